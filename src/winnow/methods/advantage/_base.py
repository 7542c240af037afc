"""Base of advantages, and array operations that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ...types import Group


class Advantage:
    """Scores each rollout of a batch against a baseline.

    One that needs a group's rewards and nothing else overrides `__call__`; others override `of_batch`.
    """

    greedy_baseline: ClassVar[bool] = False
    """Whether every group gets a greedy rollout in addition to its siblings."""

    may_vanish: ClassVar[bool] = True
    """Whether all advantages of a group can be 0 although its rewards differ."""

    @property
    def group_relative(self) -> bool:
        """Whether a group with equal rewards teaches nothing."""
        return True

    @property
    def scaled(self) -> bool:
        """Whether advantages have the same size in every group, however little its rewards differ."""
        return False

    @property
    def smallest_group(self) -> int:
        """Smallest group size that can give a signal."""
        return 2

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return float64 [G] for the float64 [G] of one group; NaN in, NaN out."""
        raise NotImplementedError

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return float64 [G] per group, aligned with its rollouts; NaN where `group.rewards()` is NaN."""
        return [self(group.rewards()) for group in groups]


def present(rewards_G: np.ndarray) -> np.ndarray:
    """Return the members that have a reward, [n]. Raises ValueError on another shape or an infinite reward."""
    if rewards_G.ndim != 1 or np.isinf(rewards_G).any():
        raise ValueError(f"rewards must be finite, one for each member (NaN: absent), not {rewards_G}")
    return rewards_G[~np.isnan(rewards_G)]


def no_signal(present_n: np.ndarray) -> bool:
    """Whether fewer than two members are present or all are exactly equal: group-relative advantages are then 0."""
    return len(present_n) < 2 or bool(present_n.max() == present_n.min())


def zeros_where_present(rewards_G: np.ndarray) -> np.ndarray:
    """Return 0 for members with a reward and NaN for absent ones (x - x is exactly that for finite or NaN x)."""
    return rewards_G - rewards_G
