"""Policy versions of sampled tokens."""

from __future__ import annotations

import numpy as np


class Versions:
    """The engine steps from which each version was in use, as far back as a running sequence goes."""

    def __init__(self) -> None:
        self._swaps = [(0, 0)]

    def swap(self, step: int, version: int, oldest: int) -> None:
        """`version` samples from engine step `step` on; nobody asks any more for steps before `oldest`."""
        self._swaps.append((step, version))
        while len(self._swaps) > 1 and self._swaps[1][0] <= oldest:
            del self._swaps[0]

    def unchanged_since(self, step: int) -> bool:
        return self._swaps[-1][0] <= step

    def of(self, born: int, count: int) -> np.ndarray:
        """int32 [count]: of the tokens of a sequence whose first one was sampled in step `born`."""
        if self.unchanged_since(born):
            return np.full(count, self._swaps[-1][1], dtype=np.int32)
        starts, versions = np.array(self._swaps).T
        steps = np.arange(born, born + count)
        return np.asarray(versions[np.searchsorted(starts, steps, side="right") - 1], dtype=np.int32)

    def forget(self, step: int) -> None:
        """All but the newest: nothing is running."""
        self._swaps = [(step, self._swaps[-1][1])]
