"""CISPO: the importance ratio is a capped weight, and every token keeps its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import PolicyLoss, Sampled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """-w * min(ratio, epsilon_high) * A * logp, the ratio detached (MiniMax-M1, 2506.13585).

    PPO's clip drops the gradient of a token whose ratio has left the range; this only limits it.
    """

    epsilon_high: float = 5.0
    """Largest ratio itself, as in TRL (not the distance from 1); 5 as TRL's documentation and ScaleRL recommend."""

    def __post_init__(self) -> None:
        if self.epsilon_high <= 0:
            raise ValueError(f"epsilon_high must be > 0, not {self.epsilon_high}; it is the largest ratio, e.g. 5")

    def __call__(self, on: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = self.ratio(on).detach()
        loss = -on.weights_BT * ratio.clamp(max=self.epsilon_high) * on.advantages * on.logp_BT
        return loss, (ratio > self.epsilon_high).expand_as(on.logp_BT)
