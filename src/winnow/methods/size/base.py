"""Interface of group sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from ...base.state import Stateful
from ...types import Group, GroupKind


class GroupSize(Stateful, ABC):
    """Decides how many siblings the next groups have."""

    smallest: int
    """Size of the run's smallest group."""
    largest: int
    """Size of the run's largest group."""
    in_parts: bool = False
    """Whether siblings may join a finished group (`more`)."""

    @abstractmethod
    def next(self) -> int:
        """Return the size of the next group."""

    def more(self, group: Group, kind: GroupKind) -> int:
        """Return how many siblings join a group whose parts so far are finished; 0: it is whole."""
        return 0

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """Learn from a training step's metrics; called once per step."""
        return
