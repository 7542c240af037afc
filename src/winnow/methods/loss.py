"""The loss of an update: a policy loss (`policy_loss/`), a KL to a reference, and an entropy bonus.

Every term is a weighted sum over action tokens. The row weight (`MicroBatch.row_weight_B`) already holds the token
reduction over the WHOLE optimizer batch, so micro-batches add up and all terms share one denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from ..config import GroupWeighting, LossType
from ..config.options import weighs_equally
from .correct import Correction
from .correct.none import NoCorrection
from .policy_loss import Clip, PolicyLoss, Sampled


@dataclass(frozen=True)
class LossConfig:
    """Options of the loss. Names and meanings are TRL's where it has them."""

    policy_loss: PolicyLoss = field(default_factory=Clip)
    loss_type: LossType = "dapo"
    """`dapo`: mean over all tokens of the batch. `grpo`: mean over a rollout's tokens, then over rollouts. `dr_grpo`:
    sum over tokens divided by `max_completion_length`, mean over rollouts. `sequence_sum`: sum over tokens, mean over
    rollouts (RLOO)."""
    group_weighting: GroupWeighting | None = None
    """Weight of a group in the mean. `equal`: the same for each, whatever was pruned, failed or masked, and at any
    group size. `size`: its number of rollouts in the loss, or, for `dapo`, of tokens. They differ only where groups do.
    None: `size` for `dapo`, whose mean is over all tokens; else `equal`, as in the formulas of GRPO, Dr. GRPO and
    Active-RLOO (eq. 3), whose mean over a prompt's rollouts comes first."""
    beta: float = 0.0
    """Weight of the KL to the reference, in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    correction: Correction = field(default_factory=NoCorrection)
    teacher_weight: float = 0.0
    """Weight of log teacher - log policy in the advantage of each token."""
    reward_weight: float = 1.0
    """Weight of the advantage from rewards."""

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ValueError(f"beta must be >= 0, not {self.beta}")

    @property
    def equal_groups(self) -> bool:
        return weighs_equally(self.loss_type, self.group_weighting)

    @property
    def ratio_to_learner(self) -> bool:
        """Whether the loss's ratio is to the policy before the batch's first update, and not to the sampler.

        True where a correction accounts for the difference between the two.
        """
        return self.policy_loss.has_ratio and self.correction.active and self.correction.weigh

    @property
    def only_advantages(self) -> bool:
        """Whether a row with advantage 0 has no gradient at all, so the forward pass can skip it."""
        return self.beta == 0 and self.entropy_coef == 0 and self.teacher_weight == 0


def kl_divergence(logp: torch.Tensor, ref_logp: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return a per-token estimate of KL(policy || reference) from policy tokens (Schulman 2020), same shape as `logp`.

    k1: log ratio, unbiased. k2: half its square, low variance. k3: exp(-d) - 1 + d, unbiased and never negative. As a
    loss on the policy's own samples, k2 has the gradient of the true KL, k3 that of the reverse KL(reference ||
    policy). The gradient of k1 is zero on average.
    """
    d = logp - ref_logp
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    if estimator == "k3":
        return torch.exp(-d) - 1 + d
    raise ValueError(f"unknown KL estimator {estimator!r}; one of k1, k2, k3")


def kl_loss(on: Sampled, ref_logp_BT: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Return the per-token KL term, [B, T]: the estimate times the policy term's weight, without `beta`.

    The tokens come from the sampler, but `kl_divergence` needs tokens of the policy. Without the importance weight w,
    k3 would have the gradient E_sampler[(1 - ref / policy) grad logp], which belongs to no divergence. With it, off
    policy as on: k1 has no gradient on average; k2 that of KL(policy || reference), k3 that of KL(reference || policy),
    both token by token at the states that the policy visits. With w of single tokens the states are the sampler's, as
    in the policy term. w = `weights_BT`, times the ratio where the policy loss has one, never limited: a clip stops
    rewards from moving the policy, but must not stop the KL from holding it back. w is detached: on policy it is 1 and
    changes nothing.
    """
    weights = on.weights_BT
    if config.policy_loss.has_ratio:
        weights = weights * config.policy_loss.ratio(on._replace(logp_BT=on.logp_BT.detach()))
    return weights * kl_divergence(on.logp_BT, ref_logp_BT, config.kl_estimator)
