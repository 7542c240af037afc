"""KL to the initial policy of a run that nothing holds to it (Active-RLOO, figure 2b)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import Group
from .base import Learner
from .batch import Row


def kl_to_reference(groups: Sequence[Group], learner: Learner) -> float | None:
    """KL(sampling policy || reference), nats a token; None without a rewarded rollout. One forward pass.

    The mean of log sampler - log reference over the action tokens of the rewarded rollouts (k1, unbiased; slightly
    below 0 by chance where the policy has hardly moved). Under lag it is the divergence of the policies that sampled.
    """
    rows = [
        Row(rollout, 0.0, 0.0)
        for group in groups
        for rollout in group.siblings
        if rollout.reward is not None and rollout.action_mask.any()
    ]
    if not rows:
        return None
    ratios = []
    for row, reference_A in zip(rows, learner.reference_logp(rows), strict=True):
        sampler_A = torch.from_numpy(row.rollout.sampler_logp[row.rollout.action_mask])
        ratios.append(sampler_A.double() - reference_A.cpu().double())
    return float(torch.cat(ratios).mean())
