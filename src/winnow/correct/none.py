"""No correction: right when the sampler is the learner."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NoCorrection:
    """Weight 1 for every token."""

    active = False

    def __call__(
        self, logp_BT: torch.Tensor, sampler_logp_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.ones_like(logp_BT[:, :1]), {}


@dataclass(frozen=True)
class NoScale:
    """The learning rate is what the schedule says."""

    def __call__(self, log_w_B: torch.Tensor) -> float:
        return 1.0
