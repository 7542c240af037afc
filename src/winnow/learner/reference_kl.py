"""KL to the reference model: measured, or subtracted from rewards.

Measured: for runs without a KL penalty (Active-RLOO, figure 2b).

Subtracted: no gradient flows through the penalty, but a rollout that drifts earns less. VCPO (appendix E.3) and Shah et
al. 2026: R'(x, y) = R(x, y) - beta KL(policy || reference). A rollout's estimate is its log ratio, log policy(y|x) -
log reference(y|x), summed over action tokens (k1). As in the formula, `policy` is the learner before the update, not
the sampler. For any sampler, the importance-weighted policy gradient of R' is then that of E[R] - beta KL(policy ||
reference). (k2 or k3 in the reward would give another one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..methods.advantage import Advantage
from ..methods.group_kind import are_equal
from ..types import Group, Rollout
from .base import Learner
from .off_policy import from_sampler
from .rows import unweighted_rows


def kl_to_reference(groups: Sequence[Group], learner: Learner) -> float | None:
    """Return KL(sampling policy || reference), nats per token; None without a rewarded rollout. One forward pass.

    Mean of log sampler - log reference over action tokens of rewarded rollouts (k1, unbiased; may be slightly below 0
    if the policy has hardly moved). With lag, it measures the policies that sampled.
    """
    rewarded = [rollout for group in groups for rollout in group.siblings if rollout.reward is not None]
    rows = [row for row in unweighted_rows(rewarded) if row.rollout.action_mask.any()]
    if not rows:
        return None
    of_reference_N = torch.cat(from_sampler(rows, learner.reference_logp(rows)))
    return 0.0 - float(of_reference_N.mean())  # 0 is not -0


def penalised(
    groups: Sequence[Group], learner: Learner, advantage: Advantage, beta: float
) -> tuple[list[Group], dict[str, float]]:
    """Return copies of the groups with rewards reduced by `beta` times each rollout's log ratio, and metrics.

    Only advantages use them; filters, selectors and statistics use the original rewards. A group with equal rewards
    learns from the penalty alone, at its small size. Exception: an advantage `scaled` by the spread of rewards (of the
    group, or of the batch if not group-relative). Equal rewards then stay and teach nothing, since scaling would
    inflate the penalty to the size of a reward. Metrics: `kl`, nats per token; `kl_penalty`, per rollout.
    """
    rewarded = [r for group in groups for r in group.rollouts if r.reward is not None]
    kl = _log_ratios(rewarded, learner)
    penalties = {id(r): beta * d for r, d in zip(rewarded, kl, strict=True)}
    everyone = [reward for group in groups for reward in group.known_rewards()]
    reduced = []
    for group in groups:
        compared = group.known_rewards() if advantage.group_relative else everyone
        exempt = advantage.scaled and are_equal(compared, 1e-8)
        reduced.append(group if exempt else replace(group, rollouts=[_reduced(r, penalties) for r in group.rollouts]))
    tokens = sum(int(r.action_mask.sum()) for r in rewarded)
    return reduced, {"kl": sum(kl) / max(tokens, 1), "kl_penalty": beta * sum(kl) / max(len(kl), 1)}


def _reduced(rollout: Rollout, penalties: dict[int, float]) -> Rollout:
    return rollout if rollout.reward is None else replace(rollout, reward=rollout.reward - penalties[id(rollout)])


def _log_ratios(rollouts: Sequence[Rollout], learner: Learner) -> list[float]:
    """Return log policy(y|x) - log reference(y|x) over action tokens, in nats; takes two forward passes."""
    rows = unweighted_rows(rollouts)
    pairs = zip(learner.logp(rows), learner.reference_logp(rows), strict=True)
    of_rows = iter([float((policy.double() - reference.double()).sum()) for policy, reference in pairs])
    return [sum(next(of_rows) for _ in rollout.segments) for rollout in rollouts]
