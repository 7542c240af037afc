"""KL penalty in the reward: no gradient flows through it, but a rollout that drifts earns less.

VCPO (appendix E.3) and Shah et al. 2026: R'(x, y) = R(x, y) - beta KL(policy || reference). A rollout's estimate is its
log ratio, log policy(y|x) - log reference(y|x), summed over action tokens (k1). As in the formula, `policy` is the
learner before the update, not the sampler. For any sampler, the importance-weighted policy gradient of R' is then that
of E[R] - beta KL(policy || reference). (k2 or k3 in the reward would give another one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..methods.advantage import Advantage
from ..methods.group_kind import is_zero_variance
from ..types import Group, Rollout
from .base import Learner
from .rows import rows_of_rollout


def penalised(
    groups: Sequence[Group], learner: Learner, advantage: Advantage, beta: float
) -> tuple[list[Group], dict[str, float]]:
    """Return copies of the groups with rewards reduced by `beta` times each rollout's log ratio, and metrics.

    Only advantages use them; filters, selectors and statistics use the original rewards. A group with equal rewards
    learns from the penalty alone, at its small size. Exception: an advantage `scaled` by the spread of rewards (of the
    group, or of the batch if not group-relative). Equal rewards then stay and teach nothing, since scaling would
    inflate the penalty to the size of a reward. Metrics: `kl`, nats per token; `kl_penalty`, per rollout.
    """
    judged = [r for group in groups for r in group.rollouts if r.reward is not None]
    kl = log_ratios(judged, learner)
    of_rollout = {id(r): beta * d for r, d in zip(judged, kl, strict=True)}
    found, batch_N = [], np.concatenate([np.zeros(0), *(group.rewards() for group in groups)])
    for group in groups:
        spared = advantage.scaled and is_zero_variance(group.rewards() if advantage.group_relative else batch_N)
        found.append(group if spared else replace(group, rollouts=[_less(r, of_rollout) for r in group.rollouts]))
    tokens = sum(int(r.action_mask.sum()) for r in judged)
    return found, {"kl": sum(kl) / max(tokens, 1), "kl_penalty": beta * sum(kl) / max(len(kl), 1)}


def _less(rollout: Rollout, penalties: dict[int, float]) -> Rollout:
    return rollout if rollout.reward is None else replace(rollout, reward=rollout.reward - penalties[id(rollout)])


def log_ratios(rollouts: Sequence[Rollout], learner: Learner) -> list[float]:
    """Return log policy(y|x) - log reference(y|x) over action tokens, in nats; takes two forward passes."""
    rows = [row for number, rollout in enumerate(rollouts) for row in rows_of_rollout(rollout, number=number)]
    pairs = zip(learner.logp(rows), learner.reference_logp(rows), strict=True)
    parts = iter([float((policy.double() - reference.double()).sum()) for policy, reference in pairs])
    return [sum(next(parts) for _ in rollout.segments) for rollout in rollouts]
