"""Thresholds that fit observed groups: the search for calibration, and a gate's refits during training."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from ...base.state import Count, Loose, State, Stateful

LEAST, MOST = 20, 512
"""Observed groups needed before a refit, and groups kept."""


def counts_under(value_N: np.ndarray, *weights_N: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return distinct values [M + 1], closed by 1 (the highest threshold), and for each of `weights_N` sums [M] over
    all groups that a threshold just above the value cuts."""
    distinct_M, index_N = np.unique(value_N, return_inverse=True)
    sums = [np.round(np.cumsum(np.bincount(index_N, w_N, minlength=len(distinct_M))), 12) for w_N in weights_N]
    return np.append(distinct_M, 1.0), *sums


def between(low: float, high: float) -> float:
    """Return the number with fewest digits in (low, high], near the middle."""
    middle = (low + high) / 2
    return next((t for d in range(1, 17) if low < (t := round(middle, d)) <= high), high)


class RefitState(State):
    threshold: float
    steps: Count
    seen: list[Annotated[tuple[float, bool, float], Loose]]


class Refit(Stateful):
    """A threshold refitted every `every` optimizer steps: the highest that meets a precision.

    Evidence is every group with a decision of the gate that ran to its end. A group that the gate would cut runs on
    only if an audit overrides the cut, and counts 1 / (the chance of that). With fewer than `LEAST` groups the
    threshold stays. If no threshold meets the precision it is 0, and nothing is cut until the next refit.
    """

    state_model = RefitState

    def __init__(self, threshold: float, every: int, precision: float) -> None:
        self.threshold = threshold
        self.every, self.precision = every, precision
        self.steps = 0
        self.seen: list[tuple[float, bool, float]] = []
        """Value of the signal, whether the group was worthless, and the number of groups it represents."""

    def observe(self, value: float, worthless: bool, survival_p: float) -> None:
        """Record a group. `survival_p`: its chance to run to its end, over all decisions about it and its members."""
        self.seen = [*self.seen[1 - MOST :], (value, worthless, 1 / survival_p)]

    def end_step(self) -> None:
        """End an optimizer step; every `every` steps, refit."""
        self.steps += 1
        if self.steps % self.every == 0 and len(self.seen) >= LEAST:
            self.threshold = self._chosen()

    def _chosen(self) -> float:
        value_N, worthless_N, weight_N = map(np.array, zip(*self.seen, strict=True))
        edges_M, cut_M, tp_M = counts_under(value_N, weight_N, weight_N * worthless_N)
        good_M = np.flatnonzero((tp_M >= self.precision * cut_M - 1e-9) & (edges_M[1:] > edges_M[:-1]))
        return between(float(edges_M[good_M[-1]]), float(edges_M[good_M[-1] + 1])) if len(good_M) else 0.0

    def metrics(self) -> dict[str, float]:
        return {"threshold": self.threshold, "remembered": float(len(self.seen))}
