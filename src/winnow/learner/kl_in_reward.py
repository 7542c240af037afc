"""KL to the reference in the reward: no gradient through it, but a rollout that strays is worth less.

VCPO (appendix E.3) and Shah et al. 2026: R'(x, y) = R(x, y) - beta KL(policy || reference). The estimate for a rollout
is its log ratio, log policy(y|x) - log reference(y|x), summed over its action tokens (k1), and `policy` is the learner
before the update, as in the formula, not the sampler: then the importance-weighted policy gradient of R' is that of
E[R] - beta KL(policy || reference), whatever sampled the rollouts. (k2 or k3 in the reward would give another one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..methods.advantage import Advantage
from ..methods.group_kind import is_zero_variance
from ..types import Group, Rollout
from .base import Learner
from .batch import Row


def penalised(
    groups: Sequence[Group], learner: Learner, advantage: Advantage, beta: float
) -> tuple[list[Group], dict[str, float]]:
    """Copies of the groups with `beta` times the log ratio of each rollout taken off its reward, and metrics.

    Only advantages see them: filters, selectors, statistics and whatever else asks for a signal go by the rewards as
    they are. A group whose rewards are all equal teaches the penalty alone, at its small size; under an advantage that
    is `scaled` by the spread of the rewards (of the group, or of the batch where it is not relative to the group) it
    keeps its own and teaches nothing, since that would blow the penalty up to the size of a reward. Metrics: `kl`,
    nats a token, and `kl_penalty`, a rollout.
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
    """log policy(y|x) - log reference(y|x) over the action tokens, in nats; two forward passes."""
    rows = [Row(rollout, 0.0, 0.0) for rollout in rollouts]
    pairs = zip(learner.logp(rows), learner.reference_logp(rows), strict=True)
    return [float((policy.double() - reference.double()).sum()) for policy, reference in pairs]
