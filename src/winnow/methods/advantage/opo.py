"""OPO: the optimal baseline when a rollout's squared gradient norm equals its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...types import Group
from ._base import Advantage, no_signal, present, zeros_where_present


def opo(rewards_G: np.ndarray, tokens_G: np.ndarray) -> np.ndarray:
    """Return r - sum l r / sum l, with l the action tokens of each rollout.

    float [G], NaN where absent, and [G] -> [G]; NaN members stay NaN. All equal, or fewer than two present: zeros. If
    no rollout has a token, the baseline is the mean. Raises ValueError on a shape other than [G] or an infinite reward.
    Source: Hao et al. 2025 (OPO).
    """
    there = ~np.isnan(rewards_G)
    if no_signal(present(rewards_G)):
        return zeros_where_present(rewards_G)
    lengths = tokens_G[there]
    return rewards_G - np.average(rewards_G[there], weights=lengths if lengths.any() else None)


@dataclass(frozen=True)
class Opo(Advantage):
    """OPO (Hao et al. 2025): r - length-weighted mean reward of the group."""

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        return [opo(g.rewards(), np.array([r.action_mask.sum() for r in g.rollouts], np.float64)) for g in groups]
