"""PODS (2504.13818): train the rollouts of a group whose rewards differ most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from winnow.methods.advantage import Advantage
from winnow.methods.advantage.rloo import rloo


def widest(rewards_n: np.ndarray, m: int) -> np.ndarray:
    """Return which m of n rewards have the largest variance, [n] bool: the lowest and the highest (2504.13818)."""
    order, n = np.argsort(rewards_n, kind="stable"), len(rewards_n)
    ends = [np.r_[order[:low], order[n - (m - low) :]] for low in range(m + 1)]
    best = max(ends, key=lambda some: rewards_n[some].var())
    chosen = np.zeros(n, dtype=bool)
    chosen[best] = True
    return chosen


@dataclass(frozen=True)
class Pods(Advantage):
    """PODS: RLOO's advantages of all rollouts, trained on the share of them with the largest variance of rewards.

    The others get 0, which takes no pass, and those that are kept count for them.
    """

    keep: float = 0.5

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        advantages_G = rloo(rewards_G)
        present = np.flatnonzero(~np.isnan(rewards_G))
        m = max(2, round(self.keep * len(present)))
        if m >= len(present):
            return advantages_G
        dropped = present[~widest(rewards_G[present], m)]
        advantages_G *= len(present) / m
        advantages_G[dropped] = 0.0
        return advantages_G
