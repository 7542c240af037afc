"""Base of advantages that depend on one group only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ...types import Group


class GroupRelative:
    """An advantage computed from one group's rewards and nothing else."""

    greedy_baseline: ClassVar[bool] = False
    group_relative: ClassVar[bool] = True
    scaled: ClassVar[bool] = False

    @property
    def smallest_group(self) -> int:
        return 2

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return float64 [G] for float64 [G]; NaN in, NaN out."""
        raise NotImplementedError

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        return [self(group.rewards()) for group in groups]
