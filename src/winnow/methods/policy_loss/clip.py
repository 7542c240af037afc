"""PPO's clipped surrogate, over tokens or, as GSPO, over rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .base import PolicyLoss, Sampled, clipped_surrogate, rollout_log_ratio

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Clip(PolicyLoss):
    """-w * min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) (Schulman et al. 2017, eq. 7).

    Its options are keys of the configuration, as in TRL.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    """Upper clip range; None takes `epsilon` (DAPO's clip-higher: 0.28)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio a rollout, the geometric mean of its token ratios (Zheng et al. 2025, GSPO)."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must lie in (0, 1), not {self.epsilon}")
        if self.epsilon_high is not None and self.epsilon_high <= 0:
            raise ValueError(f"epsilon_high must be > 0, not {self.epsilon_high}")

    def __call__(self, on: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return clipped_surrogate(self.ratio(on), on, self.epsilon, high)

    def ratio(self, on: Sampled) -> torch.Tensor:
        if self.importance_sampling_level == "sequence":
            return rollout_log_ratio(on).exp()
        return super().ratio(on)
