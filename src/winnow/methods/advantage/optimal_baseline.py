"""Minimum-variance baseline of importance-weighted policy gradients (OPOB, VCPO section 3.3)."""

from __future__ import annotations

import numpy as np


def optimal_baseline(rewards_B: np.ndarray, grad_norm_sq_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Return sum |u|^2 r / sum |u|^2 (VCPO, equation 7), computed in log space.

    u_i is the gradient of rollout i's log-probability as the loss weighs it: same token reduction, times the importance
    weight in use, after truncation. Returns one baseline per group (int [B]), float64 [B], aligned with the rollouts.
    Rollouts with a NaN reward are absent: they take no part, and their own baseline is NaN. Equal norms, or all norms
    0, give the mean reward. Raises ValueError on infinite rewards, negative or non-finite norms.
    """
    there_B = ~np.isnan(rewards_B)
    norms_B = np.asarray(grad_norm_sq_B, np.float64)
    if np.isinf(rewards_B).any() or not (np.isfinite(norms_B[there_B]) & (norms_B[there_B] >= 0)).all():
        raise ValueError("rewards must be finite, and squared gradient norms finite and not negative")
    found_B = np.full(len(rewards_B), np.nan)
    for group in np.unique(group_B[there_B]):
        rows = there_B & (group_B == group)
        found_B[rows] = _weighted_mean(np.asarray(rewards_B[rows], np.float64), norms_B[rows])
    return found_B


def _weighted_mean(rewards_N: np.ndarray, norms_N: np.ndarray) -> float:
    with np.errstate(divide="ignore"):
        log_N = np.log(norms_N)
    if np.isneginf(log_N).all():
        return float(rewards_N.mean())
    share_N = np.exp(log_N - log_N.max())
    return float(share_N @ rewards_N / share_N.sum())
