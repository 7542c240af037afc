"""Always `num_generations` siblings."""

from __future__ import annotations

from dataclasses import dataclass

from ...types import Prompt
from .base import GroupSize


@dataclass(frozen=True)
class Fixed:
    """Every group has `num_generations` siblings."""

    def build(self, num_generations: int) -> FixedSize:
        return FixedSize(num_generations)


class FixedSize(GroupSize):
    def __init__(self, size: int) -> None:
        self.smallest = self.largest = size

    def size_for(self, prompt: Prompt) -> int:
        return self.largest
