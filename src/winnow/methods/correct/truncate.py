"""Truncated importance sampling (TIS): the clipped ratio of learner to sampler, as a detached weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .ratios import Bounded, Evidence, weight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Truncate(Bounded):
    """Truncated importance sampling (TIS).

    Active-RLOO's weight is `level: sequence, low: 0.1003, high: 9.974` (e^-2.3 and e^2.3).
    """

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_w, outside = self._judged(on)
        return weight(log_w.clamp(*self.log_bounds)), self._counts(outside, on)
