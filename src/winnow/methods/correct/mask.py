"""Masked importance sampling (MIS): leave samples too far from the sampler out of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .ratios import Bounded, Evidence, weight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Mask(Bounded):
    """Weight 0 where the ratio lies outside [low, high], and the ratio itself elsewhere.

    DeepSeek-V3.2's rule: `level: geometric, low: 0.9, high: null, only_negative: true, weigh: false`; low = e^-delta.
    """

    only_negative: bool = False
    """Mask only rollouts of negative advantage: learning from a far-off mistake does more harm than good."""
    weigh: bool = True
    """False: kept samples have weight 1; the clipped loss takes its ratio to the sampler, which holds the weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low == 0 and self.high is None and not self.weigh:
            raise ValueError("low: 0 and high: null mask nothing, and weigh: false leaves no weight; set a bound")

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        import torch

        log_w, outside = self._judged(on)
        if self.only_negative:
            outside = outside & (on.advantages_B[:, None] < 0)
        # With only_negative, positive advantages may have ratios far out of bounds.
        kept = weight(log_w) if self.weigh else torch.ones_like(log_w)
        return torch.where(outside, 0.0, kept), self._counts(outside, on)
