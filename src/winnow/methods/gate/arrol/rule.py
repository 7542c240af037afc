"""Pruning rule of a step: fixed scores, posteriors and chances of survival (ARRoL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, exp
from typing import Any, ClassVar

import numpy as np

from ....base.noise import noise_key, uniform_array
from ....types import GroupView, Token, Verdict
from ..base import Array
from .calibration import bin_of
from .head import HeadWeights

QUALITY_STREAM = 7
"""Separates these draws from other noise."""


@dataclass(frozen=True)
class ArrolRule:
    """Maps scores to ranks among `scale_M`, ranks to bins, bins to posteriors `q_B` and chances of survival.

    A rollout survives if its draw is below its chance of survival, or among the `least` lowest of its group. The
    verdict's probability covers both. Rollouts whose score is not finite survive.
    """

    n: int
    """The detection token."""
    cold: bool
    """True while the predictor only learns: nothing is pruned."""
    seed: int
    least: int
    """Fewest survivors of a group."""
    scale_M: Array
    """float64: scores of recent rollouts by the current predictor, ascending."""
    q_B: Array
    """float64 [bins]: chance of success."""
    survival_B: Array
    """float64 [bins]: chance of survival; empty under `distinct`."""
    factor: float
    p_min: float
    head: HeadWeights

    needs: ClassVar[frozenset[str]] = frozenset({"hidden", "logp", "raw_logp", "last_hidden"})

    @property
    def at(self) -> Token:
        return Token(self.n)

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        if not views:
            return []
        logp_N = np.array([_mean(v.logp) for v in views])
        # the predictor's input must not depend on the sampling temperature; how often siblings agree does
        input_N = np.array([_mean(v.raw_logp) for v in views])
        raw_N = self.head.scores(np.array([v.hidden for v in views]), input_N)
        finite_N = np.isfinite(raw_N)
        rank_N: np.ndarray = np.full(len(raw_N), 0.5)
        if len(self.scale_M):
            rank_N = np.searchsorted(self.scale_M, raw_N) / len(self.scale_M)
        draws = {} if self.cold else self._draws(views)
        columns = (column.tolist() for column in (finite_N, rank_N, logp_N, input_N))
        verdicts = []
        for view, finite, score, logp, model_logp in zip(views, *columns, strict=True):
            if finite:
                verdicts.append(self._verdict(view, score, logp, model_logp, draws))
            else:
                verdicts.append(Verdict(True, "its score is not finite"))
        return verdicts

    def _verdict(
        self,
        view: GroupView,
        score: float,
        logp: float,
        model_logp: float,
        draws: dict[int, tuple[list[float], float]],
    ) -> Verdict:
        """Return the verdict. `logp`: mean log-probability as sampled; `model_logp`: that of the model itself."""
        assert view.sibling is not None
        assert isinstance(view.at, Token)  # the gate point when the group began; `self.n` may be newer
        number, n = bin_of(score, len(self.q_B)), view.at.n
        q, novelty = float(self.q_B[number]), novelty_of(logp + view.logp_before / n, n, len(view.running))
        evidence: dict[str, Any] = {"score": score, "q": q, "novelty": novelty, "chance": 1.0}
        evidence |= {"hidden": view.hidden, "logp": model_logp}
        if self.cold:
            return Verdict(True, evidence=evidence)
        survival = min(max(self.factor * novelty, self.p_min), 1.0)
        if len(self.survival_B):
            survival = float(self.survival_B[number])
        draws_G, enough = draws[view.visit.number]
        evidence["chance"] = chance = survival + forced_beyond(survival, len(draws_G), self.least)
        if draws_G[view.sibling] < survival or draws_G[view.sibling] <= enough:
            return Verdict(True, probability=chance, evidence=evidence)
        reason = f"pruned at token {n}: predicted success {q:.2f}, survival {survival:.2f}"
        return Verdict(False, reason, 1 - chance, evidence=evidence)

    def _draws(self, views: Sequence[GroupView]) -> dict[int, tuple[list[float], float]]:
        """Return draws by visit: one per sibling, and the highest of those that survive at any chance."""
        draws = {}
        for view in {v.visit.number: v for v in views}.values():
            key = noise_key(self.seed, QUALITY_STREAM, view.visit.prompt.ordinal, view.visit.epoch)
            size = len(view.running)
            draws_G = uniform_array(key, np.arange(size)).tolist()
            draws[view.visit.number] = draws_G, sorted(draws_G)[min(self.least, size) - 1] if self.least else -1.0
        return draws


def novelty_of(logp: float, n: int, size: int) -> float:
    """Return 1 / (expected number, in a group of `size`, of siblings equal by token n, itself included)."""
    return 1 / (1 + (size - 1) * exp(min(logp * n, 0.0)))


def _mean(values_N: np.ndarray | None) -> float:
    """Return `values_N.mean()`, in a fifth of the time."""
    assert values_N is not None
    return float(np.add.reduce(values_N) / len(values_N))


@lru_cache(maxsize=4096)
def forced_beyond(p: float, size: int, least: int) -> float:
    """Return the chance that a draw is not below p, but among the `least` lowest of `size` draws.

    The k-th lowest of n uniform draws is Beta(k, n + 1 - k), and each draw is the k-th with chance 1 / n.
    """
    if least >= size:
        return 1 - p
    # P(draw > p and fewer than `least` others below it) = sum over k <= least of P(k-th lowest > p) / n
    n, total = size, 0.0
    for k in range(1, least + 1):
        total += sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k)) / n
    return total
