"""Bases of advantages: their common facts, and those that depend on one group only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ...types import Group


class Facts:
    """What the rest of a run asks of an advantage, as for most of them; see `Advantage`."""

    greedy_baseline: ClassVar[bool] = False

    @property
    def group_relative(self) -> bool:
        return True

    @property
    def scaled(self) -> bool:
        return False

    @property
    def smallest_group(self) -> int:
        return 2


class GroupRelative(Facts):
    """An advantage computed from one group's rewards and nothing else."""

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return float64 [G] for float64 [G]; NaN in, NaN out."""
        raise NotImplementedError

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        return [self(group.rewards()) for group in groups]
