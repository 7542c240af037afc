"""Interface of group sizes."""

from __future__ import annotations

from collections.abc import Mapping

from ...base.state import Stateful
from ...types import Group, GroupKind


class GroupSize(Stateful):
    """Decides how many siblings the next groups have; by default always the smallest number."""

    in_parts: bool = False
    """Whether siblings may join a finished group (`more`)."""

    def __init__(self, smallest: int, largest: int) -> None:
        """Take the sizes of the run's smallest and largest group."""
        self.smallest, self.largest = smallest, largest

    def next(self) -> int:
        """Return the size of the next group."""
        return self.smallest

    def more(self, group: Group, kind: GroupKind) -> int:
        """Return how many siblings join a group whose parts so far are finished; 0: it is whole."""
        return 0

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """Learn from a training step's metrics; called once per step."""
        return
