"""Rewards that need no worker process: exact answers, and DAPO's soft punishment of long completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .pooled import completion_text, gold_text


def exact_answer(completions: Sequence[Any], ground_truth: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1.0 for exactly the reference answer, ignoring surrounding blanks; else 0.0.

    Raises ValueError for a row without a reference answer.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, ground_truth, strict=True):
        missing = gold is None or (isinstance(gold, float) and math.isnan(gold))  # of a data frame
        if missing or not (reference := gold_text(gold).strip()):
            raise ValueError("the exact reward needs a reference answer in column 'ground_truth'; this row has none")
        rewards.append(float(completion_text(completion).strip() == reference))
    return rewards


@dataclass(frozen=True)
class SoftOverlong:
    """DAPO's reward function: 0 up to `longest - cache` tokens, then falling evenly to -1 at `longest`.

    2503.14476, eq. 13.
    """

    longest: int
    """`max_completion_length`, in tokens."""
    cache: int
    """Tokens over which it falls."""
    __name__: ClassVar[str] = "soft_overlong"

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.longest:
            raise ValueError(
                f"soft_overlong_cache: {self.cache} must be at most max_completion_length={self.longest}; lower it"
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        free = self.longest - self.cache
        return [min(0.0, max(-1.0, (free - len(ids)) / self.cache)) for ids in completion_ids]
