"""Keys and values of all slots, preallocated: row = slot, column = position in the sequence.

Every running row is one of the first N slots, so a decode step reads plain views. Rows have different lengths;
attention runs over chunks of neighbouring rows, each over only as many columns as its longest row needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

GRAIN = 16
"""Rows are chunked in multiples of this, columns rounded up to it."""
CALL_COST = 1 << 15
"""Cache elements that can be read in the time that one more attention call costs; measured on CPU."""


class Chunk(NamedTuple):
    start: int
    stop: int
    columns: int


class KVCache:
    """`keys[l]` and `values[l]`: [slots, heads, capacity, D]; `mask`: [slots, capacity], 0 where filled, else -inf."""

    def __init__(
        self,
        shapes: list[tuple[tuple[int, int], tuple[int, int]]],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._new: dict[str, Any] = {"dtype": dtype, "device": device}
        self.capacity = 0
        self.keys = [torch.zeros(slots, heads, 0, size, **self._new) for (heads, size), _ in shapes]
        self.values = [torch.zeros(slots, heads, 0, size, **self._new) for _, (heads, size) in shapes]
        self.mask = torch.zeros(slots, 0, **self._new)
        self._rows = torch.arange(slots, device=device)

    def reserve(self, columns: int) -> None:
        """Grow to at least this many columns."""
        if columns <= self.capacity:
            return
        capacity = -(-columns // 64) * 64
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                new = torch.zeros(*old.shape[:2], capacity, old.shape[3], **self._new)
                new[:, :, : self.capacity] = old
                tensors[i] = new
        mask = torch.full((len(self.mask), capacity), -torch.inf, **self._new)
        mask[:, : self.capacity] = self.mask
        # Slots that never held a row are computed too when shapes are fixed: give their softmax one column.
        mask[:, 0] = 0
        self.mask, self.capacity = mask, capacity

    def insert(
        self, rows: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], lengths: list[int]
    ) -> None:
        """Put prompts of `lengths` (keys[l]: [M, heads, P, D]) into `rows` [M]."""
        width = keys[0].shape[2]
        for cached, new in zip(self.keys + self.values, keys + values, strict=True):
            cached[:, :, :width].index_copy_(0, rows, new)
        columns = torch.arange(self.capacity, device=rows.device)
        filled = torch.zeros(len(rows), self.capacity, **self._new)
        self.mask.index_copy_(
            0, rows, filled.masked_fill_(columns >= torch.tensor(lengths, device=rows.device)[:, None], -torch.inf)
        )

    def copy_of(self, row: int, columns: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of the first columns of a row, one [heads, columns, D] a layer."""
        keys, values = ([t[row, :, :columns].clone() for t in tensors] for tensors in (self.keys, self.values))
        return keys, values

    def move(self, target: torch.Tensor, source: torch.Tensor, columns: int) -> None:
        """Copy rows `source` to rows `target`, all at once: a permutation is fine."""
        for cached in self.keys + self.values:
            live = cached[:, :, :columns]
            live.index_copy_(0, target, live.index_select(0, source))
        self.mask.index_copy_(0, target, self.mask.index_select(0, source))

    def open(self, positions_N: torch.Tensor, heads: int) -> torch.Tensor:
        """Unmask the column that each row is about to write; returns where its heads lie (int64 [N * heads]).

        The index counts columns of a layer with that many heads: `keys[l].view(-1, D)[index]`.
        """
        n = len(positions_N)
        self.mask.view(-1).index_fill_(0, self._rows[:n] * self.capacity + positions_N, 0)
        if heads == 1:
            return self._rows[:n] * self.capacity + positions_N
        head_rows = self._rows[:n, None] * heads + torch.arange(heads, device=positions_N.device)
        return (head_rows * self.capacity + positions_N[:, None]).view(-1)


def plan(lengths_N: np.ndarray, elements_per_column: int) -> list[Chunk]:
    """Cut rows into chunks: a chunk takes in its neighbour while that pads less than a further call would cost."""
    if not len(lengths_N):
        return []
    starts = range(0, len(lengths_N), GRAIN)
    tops = (np.maximum.reduceat(lengths_N, starts) + GRAIN - 1) // GRAIN * GRAIN
    chunks: list[Chunk] = []
    for start, top in zip(starts, tops.tolist(), strict=True):
        stop = min(start + GRAIN, len(lengths_N))
        if chunks:
            last = chunks[-1]
            columns = max(last.columns, top)
            padding = (columns - last.columns) * (last.stop - last.start) + (columns - top) * (stop - start)
            if padding * elements_per_column <= CALL_COST:
                chunks[-1] = Chunk(last.start, stop, columns)
                continue
        chunks.append(Chunk(start, stop, top))
    return chunks


def padded(chunks: list[Chunk]) -> int:
    """Row-columns that attention reads."""
    return sum((c.stop - c.start) * c.columns for c in chunks)
