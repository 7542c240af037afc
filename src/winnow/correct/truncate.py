"""Truncated importance sampling (TIS): the ratio of learner to sampler, clipped, as a detached weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .ratios import Level, log_ratio


@dataclass(frozen=True)
class Truncate:
    """Truncated importance sampling (TIS).

    Active-RLOO's weight is `level: sequence, low: 0.1003, high: 9.974` (e^-2.3 and e^2.3).

    `low` and `high` bound the ratio itself; it is computed in log space, so it cannot overflow.
    """

    level: Level = "sequence"
    low: float = 0.0
    high: float = 8.0
    active = True

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"bounds must satisfy 0 <= low < high, not low={self.low}, high={self.high}")

    def __call__(
        self,
        logp_BT: torch.Tensor,
        sampler_logp_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        advantages_B: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        log_w = log_ratio(logp_BT, sampler_logp_BT, mask_BT, self.level)
        low = math.log(self.low) if self.low > 0 else -math.inf
        outside = (log_w < low) | (log_w > math.log(self.high))
        counted = mask_BT if self.level == "token" else mask_BT.any(1, keepdim=True)
        metrics = {"clipped": float((outside & counted.bool()).sum()), "clipped_of": float(counted.sum())}
        return log_w.clamp(low, math.log(self.high)).exp(), metrics
