"""KL to the initial policy, for runs without a KL penalty (Active-RLOO, figure 2b)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import Group
from .base import Learner
from .rows import rows_of_rollout


def kl_to_reference(groups: Sequence[Group], learner: Learner) -> float | None:
    """Return KL(sampling policy || reference), nats per token; None without a rewarded rollout. One forward pass.

    Mean of log sampler - log reference over action tokens of rewarded rollouts (k1, unbiased; may be slightly below 0
    if the policy has hardly moved). With lag, it measures the policies that sampled.
    """
    rewarded = [rollout for group in groups for rollout in group.siblings if rollout.reward is not None]
    every = [row for number, rollout in enumerate(rewarded) for row in rows_of_rollout(rollout, number=number)]
    rows = [row for row in every if row.rollout.action_mask.any()]
    if not rows:
        return None
    ratios = []
    for row, reference_A in zip(rows, learner.reference_logp(rows), strict=True):
        sampler_A = torch.from_numpy(row.rollout.sampler_logp[row.rollout.action_mask])
        ratios.append(sampler_A.double() - reference_A.cpu().double())
    return float(torch.cat(ratios).mean())
