"""OTB: one baseline per token, weighted by the policy's uncertainty up to that token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...base.token_filters import running_sum
from ..segments import first_rows, sum_before, sum_by_rollout
from .in_update import InUpdate, Weighing

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Otb(InUpdate):
    """Optimal token baseline (Li et al. 2025): r - sum W_t r / sum W_t, W_t the energy of the logits up to token t.

    Token t is the t-th that the policy sampled; prompt and environment tokens do not count.
    """

    weighing: ClassVar[Weighing] = "energy"


def energy(logp_BT: torch.Tensor, squares_BT: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return w^2 (1 - 2 p(y) + sum over v of p(v)^2), [B, T].

    Without w it is the squared norm of the gradient of a token's log-probability with respect to its logits.
    `squares_BT`: sum of the squared probabilities of all tokens. `weights`: of the loss, broadcastable.
    """
    return weights**2 * (1 - 2 * logp_BT.exp() + squares_BT)


def token_sums(
    rewards_B: torch.Tensor,
    energy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    number_B: torch.Tensor,
    groups: int,
    rollout_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return parts of the baselines, float64 [4, P, A]: sums per group of W r, W, r and 1 at the A action tokens.

    W_t is the sum of the energies of the rollout's first t action tokens. Rollouts without a t-th do not count there.
    """
    import torch

    count_R = sum_by_rollout(mask_BT.sum(1), rollout_B)
    there_RA = torch.arange(int(count_R.max()), device=mask_BT.device) < count_R[:, None]
    energy_RA = torch.zeros(there_RA.shape, dtype=torch.float64, device=mask_BT.device)
    energy_RA[there_RA] = energy_BT.double()[mask_BT]
    there = there_RA.double()
    weight_RA = there * running_sum(energy_RA)
    rewards_R1 = first_rows(rewards_B, rollout_B).double()[:, None]
    parts = torch.stack([weight_RA * rewards_R1, weight_RA, there * rewards_R1, there])
    return parts.new_zeros(4, groups, there.shape[1]).index_add_(1, first_rows(number_B, rollout_B), parts)


def token_baselines(sums: torch.Tensor) -> torch.Tensor:
    """Return sum W_t r / sum W_t, [P, A]; the mean reward where all W_t are 0, and 0 without a token.

    A token without a sibling token has its own reward as baseline, so the tail of the longest rollout teaches nothing.
    Same as verl's `optimal_token_baseline` without `handle_zero_tail`.
    """
    import torch

    weighted, weights, rewards, count = sums
    return torch.where(weights > 0, weighted / weights.clamp(min=1e-300), rewards / count.clamp(min=1))


def at_tokens(
    baselines_PA: torch.Tensor, number_B: torch.Tensor, mask_BT: torch.Tensor, rollout_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each row's baselines at its action tokens, [B, T]; values outside the mask are undefined."""
    position_BT = (sum_before(mask_BT.sum(1), rollout_B)[:, None] + mask_BT.cumsum(1) - 1).clamp(min=0)
    return baselines_PA[number_B].gather(1, position_BT)
