"""Advantages: how much better than expected each rollout was; NaN where a member is absent.

Most are pure functions of one group's rewards (`GroupRelative`). Others need the whole batch or a greedy rollout, and
some have a baseline that only the update can compute (`InUpdate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...types import Group
from .dr_grpo import DrGrpo, dr_grpo
from .grpo import Grpo, grpo
from .in_update import InUpdate
from .max_at_k import MaxAtK, max_at_k
from .opo import Opo, opo
from .opob import Opob
from .optimal_baseline import optimal_baseline
from .otb import Otb
from .reinforce_pp import ReinforcePP, reinforce_pp
from .remax import ReMax, remax
from .rloo import Rloo, rloo


class Advantage(Protocol):
    """Scores each rollout of a batch against a baseline."""

    @property
    def greedy_baseline(self) -> bool:
        """Whether every group gets a greedy rollout in addition to its siblings."""
        ...

    @property
    def group_relative(self) -> bool:
        """Whether a group with equal rewards teaches nothing."""
        ...

    @property
    def scaled(self) -> bool:
        """Whether advantages have the same size in every group, however little its rewards differ."""
        ...

    @property
    def smallest_group(self) -> int:
        """Smallest group size that can give a signal."""
        ...

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return float64 [G] per group, aligned with its rollouts; NaN where `group.rewards()` is NaN."""
        ...


ADVANTAGES: dict[str, type] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "dr_grpo": DrGrpo,
    "max_at_k": MaxAtK,
    "reinforce_pp": ReinforcePP,
    "remax": ReMax,
    "opob": Opob,
    "otb": Otb,
    "opo": Opo,
}

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "InUpdate",
    "dr_grpo",
    "grpo",
    "max_at_k",
    "opo",
    "optimal_baseline",
    "reinforce_pp",
    "remax",
    "rloo",
]
