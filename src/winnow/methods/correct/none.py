"""No correction: right when the sampler is the learner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...base.state import Stateful
from .ratios import Evidence


@dataclass(frozen=True)
class NoCorrection:
    """Weight 1 for every token."""

    active = False
    weigh = False

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.ones_like(on.logp_BT[:, :1]), {}


@dataclass(frozen=True)
class NoScale(Stateful):
    """No scale: the learning rate follows the schedule."""

    active = False

    def build(self) -> NoScale:
        return self

    def __call__(self, ess_ratio: float) -> float:
        return 1.0

    def metrics(self) -> dict[str, float]:
        return {}
