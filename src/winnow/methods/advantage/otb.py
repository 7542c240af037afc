"""OTB: a baseline for every token, weighed by how uncertain the policy has been on the way there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .in_update import InUpdate, Weighing


@dataclass(frozen=True)
class Otb(InUpdate):
    """Optimal token baseline (Li et al. 2025): r - sum W_t r / sum W_t, W_t the energy of the logits up to token t."""

    weighing: ClassVar[Weighing] = "energy"


def energy(logp_BT: torch.Tensor, squares_BT: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """w^2 (1 - 2 p(y) + sum over v of p(v)^2), [B, T].

    Without w it is the squared norm of the gradient of a token's log-probability with respect to its logits.
    `squares_BT`: the sum of the squared probabilities of all tokens. `weights`: of the loss, broadcastable.
    """
    return weights**2 * (1 - 2 * logp_BT.exp() + squares_BT)


def token_sums(
    rewards_B: torch.Tensor, energy_BT: torch.Tensor, mask_BT: torch.Tensor, number_B: torch.Tensor, groups: int
) -> torch.Tensor:
    """Parts of the baselines, float64 [4, P, T]: sums over each group of W r, W, r and 1 at every token.

    W_t is the sum of the energies of the rollout's action tokens up to t. Only rollouts that have an action token at t
    count there. Rows of a group must be aligned: column t is the same number of tokens after the prompt in all.
    """
    mask = mask_BT.double()
    weight_BT = mask * torch.where(mask_BT, energy_BT, 0.0).double().cumsum(1)
    rewards_B1 = rewards_B.double()[:, None]
    parts = torch.stack([weight_BT * rewards_B1, weight_BT, mask * rewards_B1, mask])
    return parts.new_zeros(4, groups, mask.shape[1]).index_add_(1, number_B, parts)


def token_baselines(sums: torch.Tensor) -> torch.Tensor:
    """sum W_t r / sum W_t, [P, T]; the mean reward where all W_t are 0, and 0 where there is no token.

    A token with no other rollout beside it has its own reward for a baseline, so the tail of the longest teaches
    nothing. As verl's `optimal_token_baseline` without `handle_zero_tail`.
    """
    weighted, weights, rewards, count = sums
    return torch.where(weights > 0, weighted / weights.clamp(min=1e-300), rewards / count.clamp(min=1))
