"""REINFORCE++: rewards normalised over the whole batch instead of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...types import Group
from ._base import Advantage, no_signal, present, zeros_where_present


def reinforce_pp(rewards_N: np.ndarray, tokens_N: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Return (r - mean) / (std + eps), mean and population std over all action tokens of the batch.

    float [N], NaN where absent, and the number of action tokens of each rollout [N] -> [N]. Every token counts its
    rollout's reward once, so a long rollout weighs more. NaN members stay NaN. No tokens, or all rewards equal: zeros.
    Raises ValueError on another shape or an infinite reward. Source: Hu 2025 (REINFORCE++), global advantage
    normalisation; its KL penalty is `kl_in_reward`, a rollout's whole penalty at every token.
    """
    counted = ~np.isnan(rewards_N) & (tokens_N > 0)
    if no_signal(present(np.where(counted, rewards_N, np.nan))):
        return zeros_where_present(rewards_N)
    mean = np.average(rewards_N[counted], weights=tokens_N[counted])
    std = np.average((rewards_N[counted] - mean) ** 2, weights=tokens_N[counted]) ** 0.5
    return (rewards_N - mean) / (std + eps)


@dataclass(frozen=True)
class ReinforcePP(Advantage):
    """REINFORCE++ (Hu 2025): (r - mean) / (std + eps) over all tokens of the batch, no group baseline."""

    eps: float = 1e-6
    group_relative: ClassVar[bool] = False
    scaled: ClassVar[bool] = True

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        if not groups:
            return []
        rewards_N = np.concatenate([group.rewards() for group in groups])
        tokens_N = np.array([r.action_mask.sum() for group in groups for r in group.rollouts], dtype=np.float64)
        ends = np.cumsum([len(group.rollouts) for group in groups])
        return np.split(reinforce_pp(rewards_N, tokens_N, self.eps), ends[:-1])
