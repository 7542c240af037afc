"""GSPO-token: GSPO's ratio and clip, with a gradient of each token's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import PolicyLoss, Sampled, clipped_surrogate, rollout_log_ratio

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GspoToken(PolicyLoss):
    """The clipped surrogate of s * policy / detached policy, s the rollout's detached ratio (Zheng et al. 2025,
    2507.18071).

    With one advantage a rollout its gradient is GSPO's (`policy_loss: clip`, `importance_sampling_level: sequence`,
    `loss_type: grpo`); tokens may have advantages of their own.
    """

    epsilon: float = 3e-4
    epsilon_high: float = 4e-4
    """The paper's ranges, which are small, as a mean over a rollout hardly moves."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1 or self.epsilon_high <= 0:
            raise ValueError(f"epsilon must lie in (0, 1) and epsilon_high be > 0: {self.epsilon}, {self.epsilon_high}")

    def __call__(self, on: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_surrogate(self.ratio(on), on, self.epsilon, self.epsilon_high)

    def ratio(self, on: Sampled) -> torch.Tensor:
        import torch

        return rollout_log_ratio(on).detach().exp() * torch.exp(on.logp_BT - on.logp_BT.detach())
