"""Masked importance sampling (MIS): what is too far from the sampler is left out of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .ratios import Level, log_ratio


@dataclass(frozen=True)
class Mask:
    """Weight 0 where the ratio lies outside of [low, high], and the ratio itself elsewhere.

    DeepSeek-V3.2's rule: `level: geometric, low: 0.9, high: .inf, only_negative: true, weigh: false`; low = e^-delta.
    """

    level: Level = "sequence"
    low: float = 0.0
    high: float = 8.0
    only_negative: bool = False
    """Mask rollouts of negative advantage alone: to learn from a far-off mistake does more harm than good."""
    weigh: bool = True
    """False: weight 1 for what is kept, as where the clipped loss has the ratio itself."""
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
        if self.only_negative:
            outside = outside & (advantages_B[:, None] < 0)
        counted = mask_BT if self.level == "token" else mask_BT.any(1, keepdim=True)
        metrics = {"clipped": float((outside & counted.bool()).sum()), "clipped_of": float(counted.sum())}
        # Where only negative advantages are masked, others may be far off: never infinite.
        weight = log_w.clamp(max=math.log(LARGEST)).exp() if self.weigh else torch.ones_like(log_w)
        return torch.where(outside, 0.0, weight), metrics


LARGEST = 1e6
"""Of a weight that no bound applies to."""
