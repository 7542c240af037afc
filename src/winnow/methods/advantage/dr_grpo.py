"""Dr. GRPO: deviation from the group mean, without the division that favours nearly solved prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._base import Advantage, no_signal, present, zeros_where_present


def dr_grpo(rewards_G: np.ndarray) -> np.ndarray:
    """Return r - mean over the members that have a reward.

    [G] -> [G]; NaN members stay NaN. All equal, or fewer than two present: zeros. Raises ValueError on a shape
    other than [G] or an infinite reward. Source: Liu et al. 2025 (Dr. GRPO).
    """
    there = present(rewards_G)
    if no_signal(there):
        return zeros_where_present(rewards_G)
    return rewards_G - there.mean()


@dataclass(frozen=True)
class DrGrpo(Advantage):
    """Dr. GRPO (Liu et al. 2025): r - mean, no division by the standard deviation."""

    may_vanish: ClassVar[bool] = False

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        return dr_grpo(rewards_G)
