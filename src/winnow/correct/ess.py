"""Effective sample size of a batch of importance weights, and the step size that goes with it (VCPO)."""

from __future__ import annotations

import math

import torch


def effective_sample_size(log_w_B: torch.Tensor) -> float:
    """(sum w)^2 / sum w^2, between 1 and B, from log weights [B] of any size (VCPO, section 2.2; Kong 1992).

    The weights are those of whole rollouts, before any truncation. Raises ValueError on an empty batch or a weight that
    is NaN or infinite; log weights of -inf (a rollout the learner would never sample) count as 0, unless all are.
    """
    log_w_B = torch.as_tensor(log_w_B).detach().double().reshape(-1)
    if not len(log_w_B) or torch.isnan(log_w_B).any() or (log_w_B == math.inf).any() or (log_w_B == -math.inf).all():
        raise ValueError("the effective sample size needs log weights below infinity, at least one of them finite")
    relative_B = (log_w_B - log_w_B.max()).exp()  # scaling all weights leaves it as it is, and the largest is 1
    return float(relative_B.sum() ** 2 / (relative_B**2).sum())


def lr_scale(ess_ratio: float, reference: float = 1.0) -> float:
    """sqrt(min(1, ess_ratio / reference)): how much of the learning rate a batch deserves (VCPO, equation 5).

    `ess_ratio`: effective sample size over the number of rollouts; `reference`: what it is on policy. Raises ValueError
    unless both lie in (0, 1].
    """
    if not (0 < ess_ratio <= 1 + 1e-9 and 0 < reference <= 1 + 1e-9):
        raise ValueError(f"ess_ratio and reference must lie in (0, 1], not {ess_ratio}, {reference}")
    return math.sqrt(min(1.0, ess_ratio / reference))
