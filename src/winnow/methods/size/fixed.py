"""Always `num_generations` siblings."""

from __future__ import annotations

from dataclasses import dataclass

from .base import GroupSize


@dataclass(frozen=True)
class Fixed:
    """Every group has `num_generations` siblings."""

    def build(self, num_generations: int) -> GroupSize:
        return GroupSize(num_generations, num_generations)
