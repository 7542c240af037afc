"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import PolicyLoss, Sampled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """-w * 4 / tau * sigmoid(tau * (ratio - 1)) * A (Gao et al. 2025, 2511.20347).

    On policy its gradient is that of the ratio; away from 1 it fades, faster for mistakes.
    """

    limits: ClassVar[bool] = False
    sapo_temperature_pos: float = 1.0
    """tau of tokens with a positive advantage."""
    sapo_temperature_neg: float = 1.05
    """tau of all others."""

    def __post_init__(self) -> None:
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, not {getattr(self, name)}")

    def __call__(self, on: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        A = on.advantages
        tau = torch.where(A > 0, self.sapo_temperature_pos, self.sapo_temperature_neg).to(A.dtype)
        gate = torch.sigmoid(tau * (self.ratio(on) - 1)) * 4 / tau
        return -on.weights_BT * gate * A, torch.zeros_like(on.logp_BT, dtype=torch.bool)
