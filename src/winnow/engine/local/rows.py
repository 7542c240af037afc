"""Rows of the cache: siblings whose tokens so far are the same have one together, until their next tokens differ."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

T = TypeVar("T")


class CacheRows:
    """Which row of the cache each running sequence has. Rows in use are the first `n`."""

    def __init__(self) -> None:
        self.n = 0
        self.of_N = np.zeros(0, dtype=np.int64)
        """Row of each sequence."""

    def firsts(self) -> np.ndarray:
        """Return the first sequence of each row."""
        return np.unique(self.of_N, return_index=True)[1]

    def append(self, beginnings: list[T]) -> tuple[slice, list[T]]:
        """Add sequences, those with equal beginnings in one row; return the new rows and the beginning of each."""
        number = {beginning: i for i, beginning in enumerate(dict.fromkeys(beginnings), self.n)}
        self.of_N = np.concatenate([self.of_N, [number[beginning] for beginning in beginnings]])
        rows = slice(self.n, self.n + len(number))
        self.n = rows.stop
        return rows, list(number)

    def remove(self, targets: np.ndarray, sources: np.ndarray, left: int) -> None:
        """Drop sequences as their table did: `sources` have moved into the holes, `targets`, and `left` are left."""
        self.of_N[targets] = self.of_N[sources]
        self.of_N = self.of_N[:left]

    def arrange(self, tokens_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Part the sequences of a row whose last tokens differ, and close holes; return the moves (targets, sources).

        `tokens_N`: the last token of each sequence. Moves happen all at once.
        """
        of_N = self.of_N
        _, first_M, number_N = np.unique(
            of_N * (tokens_N.max(initial=0) + 1) + tokens_N, return_index=True, return_inverse=True
        )
        source_M = of_N[first_M]
        self.n = len(source_M)
        stays_M = (np.diff(source_M, prepend=-1) > 0) & (source_M < self.n)
        target_M = source_M.copy()
        target_M[~stays_M] = np.setdiff1d(np.arange(self.n), source_M[stays_M])
        self.of_N = target_M[number_N]
        return target_M[~stays_M], source_M[~stays_M]

    def sort(self, order_M: np.ndarray) -> None:
        """Follow rows that are reordered: row i was row `order_M[i]`."""
        self.of_N = np.argsort(order_M)[self.of_N]
