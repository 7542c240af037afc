"""Base class of policy losses, and what they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch


class Sampled(NamedTuple):
    """Sampled tokens of a micro-batch: B rows of T positions. What lies outside the mask is undefined."""

    logp_BT: torch.Tensor
    """Log-probabilities under the policy; the only tensor with a gradient."""
    old_logp_BT: torch.Tensor
    """Under the policy that the importance ratio is to: the sampler's, or, with a `correction` that weighs, the
    learner's before the first update on the batch."""
    advantages: torch.Tensor
    """Of rows, [B, 1], or of tokens, [B, T]."""
    weights_BT: torch.Tensor
    """Of the `correction`."""
    mask_BT: torch.Tensor
    """True for action tokens."""
    rollout_B: torch.Tensor | None = None
    """Rollout of each row (`methods.segments`)."""


class PolicyLoss:
    """A loss of single tokens. To add one, derive a frozen dataclass of its options and write `__call__`."""

    has_ratio: ClassVar[bool] = True
    """False: the importance ratio has no part in it, so that older samples need a `correction`."""
    limits: ClassVar[bool] = True
    """Whether it leaves tokens out or limits them; their share is then a metric."""

    def __call__(self, on: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each token [B, T], `weights_BT` included, and which tokens are limited (bool [B, T])."""
        raise NotImplementedError

    def ratio(self, on: Sampled) -> torch.Tensor:
        """Return the importance ratio, policy / old policy, [B, T]."""
        import torch

        return torch.exp(on.logp_BT - on.old_logp_BT)


def rollout_log_ratio(on: Sampled) -> torch.Tensor:
    """Return the mean log ratio over the action tokens of each row's rollout, [B, T] (GSPO, eq. 7)."""
    from ..segments import sum_at_rows

    log_ratio = (on.logp_BT - on.old_logp_BT).where(on.mask_BT > 0, 0.0)
    total_B1 = sum_at_rows(log_ratio.sum(1, keepdim=True), on.rollout_B)
    tokens_B1 = sum_at_rows(on.mask_BT.sum(1, keepdim=True), on.rollout_B)
    return (total_B1 / tokens_B1.clamp(min=1)).expand_as(log_ratio)


def clipped_surrogate(
    ratio: torch.Tensor, on: Sampled, epsilon: float, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -w * min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A), and where the clip decides."""
    import torch

    A, low, high = on.advantages, 1 - epsilon, 1 + epsilon_high
    loss = -on.weights_BT * torch.minimum(ratio * A, ratio.clamp(low, high) * A)
    return loss, ((ratio < low) & (A < 0)) | ((ratio > high) & (A > 0))
