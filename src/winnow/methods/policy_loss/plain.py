"""REINFORCE: no importance ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import PolicyLoss, Sampled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Plain(PolicyLoss):
    """-w * A * logp."""

    has_ratio: ClassVar[bool] = False
    limits: ClassVar[bool] = False

    def __call__(self, on: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        return -on.weights_BT * on.advantages * on.logp_BT, torch.zeros_like(on.logp_BT, dtype=torch.bool)
