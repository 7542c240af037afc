"""Every prompt once an epoch, none skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import Prompt
from .stream import StreamSelector


@dataclass(frozen=True)
class Uniform:
    """Visit every prompt once an epoch; `shuffle: false` keeps the order of the data set."""

    shuffle: bool = True

    def build(self, prompts: Sequence[Prompt], seed: int, max_reward: float = 1.0) -> StreamSelector:
        return StreamSelector(prompts, seed, shuffle=self.shuffle)
