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


@dataclass(frozen=True)
class FixedSize(Stateful):
    size: int

    @property
    def smallest(self) -> int:
        return self.size

    @property
    def largest(self) -> int:
        return self.size

    def next(self) -> int:
        return self.size

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """A fixed size learns nothing."""
