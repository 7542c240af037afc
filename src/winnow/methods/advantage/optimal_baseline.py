"""Minimum-variance baseline of importance-weighted policy gradients (OPOB, VCPO section 3.3)."""

from __future__ import annotations

from typing import Any

import numpy as np


def optimal_baseline(rewards_B: Any, log_w_B: Any, grad_norm_sq_B: Any, group_B: Any) -> np.ndarray:
    """Return sum w^2 |g|^2 r / sum w^2 |g|^2 (VCPO, equation 7), computed in log space.

    g_i is the gradient of rollout i's log-probability as the loss weighs it (same token reduction). w_i is the
    importance weight in use, after truncation. Returns one baseline per group (int [B]), float64 [B], aligned with the
    rollouts. Rollouts with a NaN reward are absent: they take no part, and their own baseline is NaN. Equal weights and
    norms, or all weights or norms 0, give the mean reward. Raises ValueError on infinite rewards, negative or
    non-finite norms, log weights of +inf or NaN.
    """
    rewards_B, log_w_B, norms_B = (np.asarray(x, np.float64) for x in (rewards_B, log_w_B, grad_norm_sq_B))
    there_B = ~np.isnan(rewards_B)
    if np.isinf(rewards_B).any() or not (np.isfinite(norms_B[there_B]) & (norms_B[there_B] >= 0)).all():
        raise ValueError("rewards must be finite, and squared gradient norms finite and not negative")
    if not (log_w_B[there_B] < np.inf).all():
        raise ValueError("log weights must be below infinity")
    groups_B = np.asarray(group_B)
    found_B = np.full(len(rewards_B), np.nan)
    for group in np.unique(groups_B[there_B]):
        rows = there_B & (groups_B == group)
        found_B[rows] = _weighted_mean(rewards_B[rows], log_w_B[rows], norms_B[rows])
    return found_B


def _weighted_mean(rewards_N: np.ndarray, log_w_N: np.ndarray, norms_N: np.ndarray) -> float:
    with np.errstate(divide="ignore"):
        log_N = 2 * log_w_N + np.log(norms_N)
    if np.isneginf(log_N).all():
        return float(rewards_N.mean())
    share_N = np.exp(log_N - log_N.max())
    return float(share_N @ rewards_N / share_N.sum())
