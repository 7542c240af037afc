"""Prefix trees: rows that begin alike share the beginning, so that each of its tokens is computed once.

The nodes of a tree are tokens. A row is a path, and each node attends to itself and to those before it on its paths. So
all outputs and gradients are those of rows computed apart; what several rows have in common gets the sum of their
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .rows import Row

GRAIN = 8
"""Trees are padded to a multiple of this: fused kernels want a mask with rows of 16 bytes."""


@dataclass(frozen=True)
class PrefixTrees:
    """U trees of up to S nodes, in depth-first order: node j is on the way to node i if j <= i < stop[j]."""

    input_ids_US: torch.Tensor
    position_ids_US: torch.Tensor
    stop_US: torch.Tensor
    node_BT: torch.Tensor
    """int64: where the trees, laid end to end, have the token of a row; 0 from its last action on."""

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [U, 1, S, S]: 0 where node i (third) attends to node j (fourth), else very negative.

        In the type of the queries: of any other, attention would keep a copy in every layer.
        """
        nodes = torch.arange(self.stop_US.shape[1], device=self.stop_US.device)
        seen_USS = (nodes <= nodes[:, None]) & (nodes[:, None] < self.stop_US[:, None, :])
        mask = torch.zeros(seen_USS.shape, dtype=dtype, device=nodes.device)
        return mask.masked_fill_(~seen_USS, torch.finfo(dtype).min)[:, None]


@dataclass
class Forest:
    """Assigns rows to trees, in the order in which they are added."""

    pairs: float
    """Pairs of tokens that attention computes in the time that one token takes elsewhere; 0: every row has a tree."""
    sizes: list[int] = field(default_factory=list)
    """Nodes of each tree."""
    _last: dict[tuple[int, ...], tuple[int, np.ndarray]] = field(default_factory=dict)
    """Prompt -> its last tree, and the row added to it last."""

    def copy(self) -> Forest:
        return Forest(self.pairs, [*self.sizes], {**self._last})

    def add(self, row: Row) -> tuple[int, int]:
        """Return the number of a row's tree, and how many tokens it shares with the row before it in that tree.

        It gets a tree of its own where attention to all nodes of a tree would cost more than sharing saves.
        """
        tokens, prompt = row.inputs, row.rollout.prompt_ids
        number, before = self._last.get(prompt, (-1, tokens[:0]))
        common = _common(before, tokens)
        size, new = self.sizes[number] if common else 0, len(tokens) - common
        if (size + new) ** 2 - size**2 - len(tokens) ** 2 / 2 > self.pairs * common:
            number, common, new = -1, 0, len(tokens)
        if not common:
            number = len(self.sizes)
            self.sizes.append(0)
        self.sizes[number] += new
        self._last[prompt] = number, tokens
        return number, common


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common beginning."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def plant(rows: Sequence[Row], pairs: float, device: torch.device | str = "cpu") -> PrefixTrees:
    """Return the trees of a micro-batch's rows. `pairs`: see `Forest`."""
    forest, placed = Forest(pairs), []
    for row in rows:
        placed.append(forest.add(row))
    S = -(-max(forest.sizes) // GRAIN) * GRAIN
    shape = len(forest.sizes), S
    ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    stops = np.broadcast_to(np.arange(1, S + 1), shape).copy()  # padding attends to itself
    nodes = np.zeros((len(rows), max(row.length for row in rows)), dtype=np.int64)
    paths = [np.zeros(0, dtype=np.int64)] * len(forest.sizes)
    grown = [0] * len(forest.sizes)
    for b, (row, (u, common)) in enumerate(zip(rows, placed, strict=True)):
        start, tokens = grown[u], row.inputs
        grown[u] = stop = start + len(tokens) - common
        stops[u, paths[u][common:]] = start
        paths[u] = np.concatenate([paths[u][:common], np.arange(start, stop)])
        ids[u, start:stop], positions[u, start:stop] = tokens[common:], np.arange(common, len(tokens))
        stops[u, paths[u]] = stop
        nodes[b, : len(tokens)] = u * S + paths[u]
    return PrefixTrees(*(torch.from_numpy(array).to(device) for array in (ids, positions, stops, nodes)))
