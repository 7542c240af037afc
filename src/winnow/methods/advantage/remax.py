"""ReMax: each reward minus that of the prompt's greedy rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...types import Group
from ._arrays import checked
from ._base import Facts


def remax(rewards_G: np.ndarray, greedy_reward: float) -> np.ndarray:
    """Return r - reward of the greedy rollout.

    [G] -> [G]; NaN members stay NaN. Raises ValueError on a shape other than [G] or an infinite reward. Source: Li et
    al. 2023 (ReMax), equation 3.
    """
    return checked(rewards_G) - greedy_reward


@dataclass(frozen=True)
class ReMax(Facts):
    """ReMax (Li et al. 2023): r - reward of a greedy rollout, sampled in addition to the group and never trained."""

    greedy_baseline: ClassVar[bool] = True
    group_relative: ClassVar[bool] = False

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return `remax` of each group. Raises ValueError when its greedy rollout has no reward."""
        advantages = []
        for group in groups:
            greedy_reward = group.greedy_reward()
            if greedy_reward is None:
                raise ValueError(f"visit {group.visit.number}: no reward of a greedy rollout, which remax needs")
            advantages.append(remax(group.rewards(), greedy_reward))
        return advantages
