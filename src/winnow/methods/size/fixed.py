"""Always `num_generations` siblings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...base.state import Stateful


@dataclass(frozen=True)
class Fixed:
    """Every group has `num_generations` siblings."""

    def build(self, num_generations: int) -> FixedSize:
        return FixedSize(num_generations)


class FixedSize(Stateful):
    def __init__(self, size: int) -> None:
        self.smallest = self.largest = size

    def next(self) -> int:
        return self.largest

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """A fixed size learns nothing."""
