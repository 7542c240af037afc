"""GRPO: deviation from the group mean in units of the group's standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._arrays import Array, checked, no_signal, present, zeros_where_present
from ._base import GroupRelative


def grpo(rewards_G: Array, eps: float = 1e-6) -> Array:
    """(r - mean) / (std + eps), population standard deviation, over the members that have a reward.

    [G] -> [G], numpy or torch, same kind out; NaN members stay NaN. All equal, or fewer than two present: zeros.
    Raises ValueError on a shape other than [G] or an infinite reward.
    Source: Shao et al. 2024 (DeepSeekMath), outcome supervision.
    """
    rewards_G = checked(rewards_G)
    there = present(rewards_G)
    if no_signal(there):
        return zeros_where_present(rewards_G)
    mean = there.mean()
    std = ((there - mean) ** 2).mean() ** 0.5
    return (rewards_G - mean) / (std + eps)


@dataclass(frozen=True)
class Grpo(GroupRelative):
    """GRPO (Shao et al. 2024): (r - mean) / (std + eps)."""

    eps: float = 1e-6
    scaled: ClassVar[bool] = True

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        return grpo(rewards_G, self.eps)
