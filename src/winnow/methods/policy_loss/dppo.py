"""DPPO: a trust region by divergence from the sampler, in place of a clipped ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .base import PolicyLoss, Sampled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """-w * M * min(ratio, clip_ratio_c) * A (Qi et al. 2026, 2602.04879, eq. 11 to 14).

    M is 0 for a token whose update would move the policy further from the sampler than the threshold allows: a positive
    advantage with a ratio above 1, or a negative one with a ratio below 1. The divergence is that of two distributions
    over {this token, any other}. A ratio says little of a rare token: 0.001 to 0.002 is a ratio of 2 and a shift of
    0.001.
    """

    divergence_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """`binary_tv`: |policy - sampler|. `binary_kl`: KL(sampler || policy); the paper's thresholds for it are 0.05."""
    epsilon: float = 0.15
    """Threshold for negative advantages."""
    epsilon_high: float = 0.15
    """Threshold for positive advantages."""
    clip_ratio_c: float = 20.0
    """Largest ratio."""

    def __post_init__(self) -> None:
        for name in ("epsilon", "epsilon_high", "clip_ratio_c"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, not {getattr(self, name)}")

    def __call__(self, on: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        A, ratio, divergence = on.advantages, self.ratio(on), self._divergence(on)
        outside = ((A > 0) & (ratio > 1) & (divergence > self.epsilon_high)) | (
            (A < 0) & (ratio < 1) & (divergence > self.epsilon)
        )
        loss = -on.weights_BT * ~outside * ratio.clamp(max=self.clip_ratio_c) * A
        return loss, outside

    def _divergence(self, on: Sampled) -> torch.Tensor:
        """Return the divergence at each token, [B, T]."""
        import torch

        p, q = on.logp_BT.detach().exp(), on.old_logp_BT.exp()
        if self.divergence_type == "binary_tv":
            return (p - q).abs()
        tiny = torch.finfo(p.dtype).eps  # of a probability of 1 the rest is 0, up to rounding
        rest = (1 - q).clamp(min=tiny) * ((1 - q).clamp(min=tiny) / (1 - p).clamp(min=tiny)).log()
        return q * (on.old_logp_BT - on.logp_BT.detach()) + rest
