"""DAPO's soft punishment of long completions (2503.14476, eq. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class SoftOverlong:
    """Reward function: 0 up to `longest - cache` tokens, then falling evenly to -1 at `longest`."""

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
