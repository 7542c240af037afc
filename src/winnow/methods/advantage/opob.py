"""OPOB: the minimum-variance baseline of the policy gradient, from the exact gradient norms of the rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...types import Group
from ..base import refuse_unused
from ._base import no_signal, present
from .in_update import InUpdate, Scope, Weighing


@dataclass(frozen=True)
class Opob(InUpdate):
    """Off-policy optimal baseline (VCPO): r - sum |u|^2 r / sum |u|^2, u a rollout's gradient as the loss weighs it.

    `optimal_baseline` with the correction's weight inside u. `scale` divides by the group's standard deviation, as GRPO
    does. Over a minibatch that division belongs into u too, and groups with equal rewards take no part.
    """

    scope: Scope = "group"
    """`group`: one baseline per prompt. `minibatch`: one for the whole optimizer batch (VCPO, algorithm 1)."""
    scale: bool = False
    eps: float = 1e-6
    """Added to the standard deviation."""
    weighing: ClassVar[Weighing] = "gradient"

    def __post_init__(self) -> None:
        if not self.scale:
            refuse_unused(self, ["eps"], "without scale; remove it, or set scale: true")

    @property
    def group_relative(self) -> bool:
        return self.scope == "group" or self.scale

    @property
    def scaled(self) -> bool:
        return self.scale

    def factor(self, rewards_G: np.ndarray) -> float:
        there = present(rewards_G)
        if not self.scale:
            return 1.0
        return 0.0 if no_signal(there) else 1 / (float(there.std()) + self.eps)

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        if self.scope == "group" or not groups:
            return super().of_batch(groups)
        rewards = [group.rewards() for group in groups]
        factors = [self.factor(rewards_G) for rewards_G in rewards]
        kept = [r for r, factor in zip(rewards, factors, strict=True) if factor]
        there = present(np.concatenate(kept)) if kept else np.zeros(0)
        mean = float(there.mean()) if len(there) else 0.0
        return [(rewards_G - mean) * factor for rewards_G, factor in zip(rewards, factors, strict=True)]


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
    baseline_B = np.full(len(rewards_B), np.nan)
    for group in np.unique(group_B[there_B]):
        rows = there_B & (group_B == group)
        baseline_B[rows] = _weighted_mean(np.asarray(rewards_B[rows], np.float64), norms_B[rows])
    return baseline_B


def _weighted_mean(rewards_N: np.ndarray, norms_N: np.ndarray) -> float:
    with np.errstate(divide="ignore"):
        log_N = np.log(norms_N)
    if np.isneginf(log_N).all():
        return float(rewards_N.mean())
    share_N = np.exp(log_N - log_N.max())
    return float(share_N @ rewards_N / share_N.sum())
