"""Keys and values of the slots in use, preallocated: row = slot, column = position in the sequence.

Siblings whose tokens so far are the same have one row together, until their next tokens differ.
Every running row is one of the first N slots, so a decode step reads plain views. Rows have different lengths;
attention runs over chunks of neighbouring rows, each over only as many columns as its longest row needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

GRAIN = 16
"""Rows are chunked in multiples of this, columns rounded up to it."""
CALL_COST = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Cache elements that can be read in the time that one more attention call costs, by device: measured on a CPU, from
launch time and memory rate on a GPU."""


class Chunk(NamedTuple):
    start: int
    stop: int
    columns: int


class KVCache:
    """`keys[l]` and `values[l]`: [rows, heads, columns, D]; `mask`: [rows, columns], 0 where filled, else -inf.
    `prompts`: int64 [2, rows], a row that begins as this one does, and how many columns are the same.

    Empty at first; `reserve` makes it as large as it needs to be, with at most `slots` rows.
    """

    def __init__(
        self,
        shapes: list[tuple[tuple[int, int], tuple[int, int]]],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes, self._slots = shapes, slots
        self._new: dict[str, Any] = {"dtype": dtype, "device": device}
        self._rows = torch.arange(slots, device=device)
        self._asked = (0, 0)
        """Most rows and columns asked for since the last `clear`."""
        self._expected = (0, 0)
        """The same between the two before."""
        self.clear()

    def clear(self) -> None:
        """Give up the memory and all that is in it; it will be as large as before when it is used again."""
        if self._asked[0]:
            self._asked, self._expected = (0, 0), self._asked
        self.rows = self.columns = 0
        self.keys = [torch.zeros(0, heads, 0, size, **self._new) for (heads, size), _ in self._shapes]
        self.values = [torch.zeros(0, heads, 0, size, **self._new) for _, (heads, size) in self._shapes]
        self.mask = torch.zeros(0, 0, **self._new)
        self.prompts = self._rows.new_zeros(2, 0)

    def reserve(self, rows: int, columns: int) -> None:
        """Grow to at least so many of both. Raises ValueError for more rows than slots."""
        if rows > self._slots:
            raise ValueError(f"{rows} rows in {self._slots} slots")
        self._asked = max(self._asked[0], rows), max(self._asked[1], columns)
        if not self.rows:  # growing row by row would copy all that is there, again and again
            rows, columns = max(rows, self._expected[0]), max(columns, self._expected[1])
        if rows <= self.rows and columns <= self.columns:
            return
        if rows > self.rows:
            rows = min(self._slots, max(-(-rows // GRAIN) * GRAIN, 2 * self.rows))
        rows, columns = max(rows, self.rows), max(-(-columns // 64) * 64, self.columns)
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                tensors[i] = torch.zeros(rows, old.shape[1], columns, old.shape[3], **self._new)
                tensors[i][: self.rows, :, : self.columns] = old
        mask = torch.full((rows, columns), -torch.inf, **self._new)
        mask[: self.rows, : self.columns] = self.mask
        # Slots that never held a row are computed too when shapes are fixed: give their softmax one column.
        mask[self.rows :, 0] = 0
        self.mask, self.rows, self.columns = mask, rows, columns
        self.prompts = self._rows.new_zeros(2, rows)

    def insert(
        self,
        rows: slice,
        index_M: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        lengths: list[int],
    ) -> None:
        """Put the prompts `index_M` of those in keys[l] and values[l], [B, heads, P, D], into M rows."""
        width = keys[0].shape[2]
        for cached, new in zip(self.keys + self.values, keys + values, strict=True):
            cached[rows, :, :width] = new.index_select(0, index_M)
        columns = torch.arange(self.columns, device=index_M.device)
        beyond = columns >= torch.tensor(lengths, device=index_M.device)[:, None]
        self.mask[rows] = torch.zeros(beyond.shape, **self._new).masked_fill_(beyond, -torch.inf)

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
        """Unmask the column that each row is about to write; returns where its heads lie (int64 [N, heads]).

        The index counts columns of a layer with that many heads: `keys[l].view(-1, D)[index]`.
        """
        n = positions_N.shape[0]
        flat_N = self._rows[:n] * self.columns + positions_N
        self.mask.view(-1).index_fill_(0, flat_N, 0)
        if heads == 1:
            return flat_N[:, None]
        head_rows = self._rows[:n, None] * heads + torch.arange(heads, device=positions_N.device)
        return head_rows * self.columns + positions_N[:, None]


class CacheRows:
    """Which row of the cache each running sequence has. Rows in use are the first `n`."""

    def __init__(self) -> None:
        self.n = 0
        self.of_N = np.zeros(0, dtype=np.int64)
        """Row of each sequence."""
        self.first_M = np.zeros(0, dtype=np.int64)
        """First sequence of each row, as `arrange` left them."""
        self._begun_2N = np.zeros((2, 0), dtype=np.int64)
        """Number and length of the beginning of each sequence."""
        self._beginnings = 0

    def append(self, beginnings: list[tuple[int, int]]) -> tuple[slice, list[tuple[int, int]]]:
        """Add sequences, those with equal beginnings in one row; return the new rows and the beginning of each.

        A beginning is any number, and how many columns it takes.
        """
        number = {beginning: i for i, beginning in enumerate(dict.fromkeys(beginnings))}
        numbers = np.array([number[beginning] for beginning in beginnings])
        begun = numbers + self._beginnings, [length for _, length in beginnings]
        self._begun_2N = np.concatenate([self._begun_2N, begun], 1)
        self._beginnings += len(number)
        self.of_N = np.concatenate([self.of_N, numbers + self.n])
        rows = slice(self.n, self.n + len(number))
        self.n = rows.stop
        return rows, list(number)

    def prompts(self, first_M: np.ndarray) -> np.ndarray:
        """Return int64 [2, M]: the first row that began as each one did, and the columns that both have of it.

        `first_M`: a sequence of each row.
        """
        number_M, length_M = self._begun_2N[:, first_M]
        _, row, of_M = np.unique(number_M, return_index=True, return_inverse=True)
        return np.stack([row[of_M], length_M])

    def remove(self, targets: np.ndarray, sources: np.ndarray, left: int) -> None:
        """Drop sequences as their table did: `sources` have moved into the holes, `targets`, and `left` are left."""
        self.of_N[targets] = self.of_N[sources]
        self.of_N = self.of_N[:left]
        self._begun_2N[:, targets] = self._begun_2N[:, sources]
        self._begun_2N = self._begun_2N[:, :left]

    def arrange(self, tokens_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Part the sequences of a row whose last tokens differ, and close holes; return the moves (targets, sources).

        `tokens_N`: the last token of each sequence. Moves happen all at once.
        """
        of_N = self.of_N
        key_N = of_N * (tokens_N.max(initial=0) + 1) + tokens_N
        order_N = key_N.argsort(kind="stable")
        new_N = _starts(key_N[order_N])
        number_N = np.empty_like(of_N)
        number_N[order_N] = new_N.cumsum() - 1
        first_M = order_N[new_N]
        source_M = of_N[first_M]
        self.n = len(source_M)
        moves_M = ~_starts(source_M) | (source_M >= self.n)
        if not moves_M.any():  # rows 0 to n - 1, in order
            self.of_N, self.first_M = number_N, first_M
            return moves_M.nonzero()[0], moves_M.nonzero()[0]
        free_M = np.ones(self.n, dtype=bool)
        free_M[source_M[~moves_M]] = False
        target_M = source_M.copy()
        target_M[moves_M] = free_M.nonzero()[0]
        self.of_N = target_M[number_N]
        self.first_M = np.empty_like(first_M)
        self.first_M[target_M] = first_M
        return target_M[moves_M], source_M[moves_M]

    def sort(self, order_M: np.ndarray) -> None:
        """Follow rows that are reordered: row i was row `order_M[i]`."""
        self.of_N = np.argsort(order_M)[self.of_N]


def _starts(sorted_N: np.ndarray) -> np.ndarray:
    """Return bool [N]: which differ from the one before."""
    starts_N = np.ones(len(sorted_N), dtype=bool)
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=starts_N[1:])
    return starts_N


def plan(lengths_N: np.ndarray, elements_per_column: int, device: str = "cpu") -> list[Chunk]:
    """Cut rows into chunks: a chunk takes in its neighbour while that pads less than a further call would cost."""
    call_cost = CALL_COST.get(device, CALL_COST["cpu"])
    if not len(lengths_N):
        return []
    if len(lengths_N) <= GRAIN:
        return [Chunk(0, len(lengths_N), -(-int(lengths_N.max()) // GRAIN) * GRAIN)]
    starts = range(0, len(lengths_N), GRAIN)
    tops = (np.maximum.reduceat(lengths_N, starts) + GRAIN - 1) // GRAIN * GRAIN
    chunks: list[Chunk] = []
    for start, top in zip(starts, tops.tolist(), strict=True):
        stop = min(start + GRAIN, len(lengths_N))
        if chunks:
            last = chunks[-1]
            columns = max(last.columns, top)
            padding = (columns - last.columns) * (last.stop - last.start) + (columns - top) * (stop - start)
            if padding * elements_per_column <= call_cost:
                chunks[-1] = Chunk(last.start, stop, columns)
                continue
        chunks.append(Chunk(start, stop, top))
    return chunks


def padded(chunks: list[Chunk]) -> int:
    """Row-columns that attention reads."""
    return sum((c.stop - c.start) * c.columns for c in chunks)
