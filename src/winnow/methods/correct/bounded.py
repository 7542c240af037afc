"""Base of corrections with bounds on the ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..segments import first_rows
from .ratios import Evidence, Level, log_ratio

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bounded:
    """Bounds on the ratio: `low` and `high`; `high: null` is no upper bound. Log space avoids overflow."""

    level: Level = "sequence"
    low: float = 0.0
    high: float | None = 8.0
    active = True
    weigh = True

    def __post_init__(self) -> None:
        if not 0 <= self.low < (math.inf if self.high is None else self.high):
            raise ValueError(f"bounds must satisfy 0 <= low < high, not low={self.low}, high={self.high}")

    @property
    def log_bounds(self) -> tuple[float, float]:
        return math.log(self.low) if self.low > 0 else -math.inf, math.inf if self.high is None else math.log(self.high)

    def _judged(self, on: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log ratios and which of them are out of bounds, [B, T] or [B, 1]."""
        log_w = log_ratio(on.logp_BT, on.sampler_logp_BT, on.mask_BT, self.level, on.rollout_B)
        low, high = self.log_bounds
        return log_w, (log_w < low) | (log_w > high)

    def _counts(self, outside: torch.Tensor, on: Evidence) -> dict[str, float]:
        """Return the number of tokens or rollouts out of bounds, and the total."""
        counted = on.mask_BT.bool()
        if self.level != "token":
            counted = first_rows(counted.any(1, keepdim=True), on.rollout_B)
            outside = first_rows(outside, on.rollout_B)
        return {"clipped": float((outside & counted).sum()), "clipped_of": float(counted.sum())}
