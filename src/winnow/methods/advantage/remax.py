"""ReMax: each reward minus that of the prompt's greedy rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...types import Group
from ._base import Advantage


@dataclass(frozen=True)
class ReMax(Advantage):
    """ReMax (Li et al. 2023): r - reward of a greedy rollout, sampled in addition to the group and never trained."""

    greedy_baseline: ClassVar[bool] = True
    group_relative: ClassVar[bool] = False

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Equation 3 of the paper. `GroupJudge.refusal` has taken out the groups whose greedy rollout has no reward."""
        advantages = []
        for group in groups:
            greedy_reward = group.greedy_reward()
            assert greedy_reward is not None
            advantages.append(group.rewards() - greedy_reward)
        return advantages
