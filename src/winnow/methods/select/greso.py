"""GRESO: skip, before the rollout, prompts without reward variance for a while (Zheng et al. 2025).

A prompt whose last z visits were all zero-variance is rolled out only with probability p^z. p is separate for easy
prompts (all rewards at the maximum) and hard ones. It adjusts itself so that the share of zero-variance groups of each
kind among those rolled out stays near its target. Draws are keyed by (seed, prompt, epoch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from ...base.state import Loose, Probability
from ...config.options import CHECKED
from ...types import KEEP, Group, GroupKind, Prompt, Verdict
from ..base import Chart, refuse_unused
from ..group_kind import BY_REWARDS, GroupJudge, share_seen
from .trace import EASY, TraceSelector, TraceState

ROUNDING = 1e-9
"""Tolerance of shares of counts: 4 of 24 are a target of 0.25 * (1 - 1/3), which floating point puts above 4/24."""
JUDGED = (GroupKind.SIGNAL, GroupKind.EASY, GroupKind.HARD, GroupKind.UNKNOWN)


def skip_probability(z: Any, p: Any) -> Any:
    """Return 1 - p^z (eq. 3): the chance to skip after `z` zero-variance visits in a row, at base probability `p`.

    Numbers or arrays that broadcast; a prompt that is unseen or was effective last time (z = 0) is never skipped.
    """
    z, p = np.asarray(z, dtype=np.float64), np.asarray(p, dtype=np.float64)
    skip = 1.0 - p**z
    return skip if skip.ndim else float(skip)


def rollout_batch_size(missing: int, zero_variance_share: float, default: int, safety: float = 1.25) -> int:
    """Return min(default, ceil(safety * missing / (1 - zero_variance_share))) (eq. 6): groups to roll out next.

    `missing`: effective groups still needed; `zero_variance_share`: of the groups of this step so far. `default` when
    that share is 1.
    """
    if zero_variance_share == 1:
        return default
    needed = safety * missing / (1 - zero_variance_share)
    return min(default, math.ceil(needed - ROUNDING))  # 1.25 * 4 / (1 - 0.5) is 10, not 11 by a rounding error


def adjust(p: float, share: float, target: float, step: float = 0.01, floor: float = 0.05, cap: float = 1.0) -> float:
    """Return the next step's base probability: lower by `step` if `share` >= `target`, else higher (Algorithm 1).

    Kept within [floor, cap]. The floor is not in the paper's algorithm; without it exploration would stop.
    """
    return min(cap, max(floor, p - step if share >= target - ROUNDING else p + step))


@dataclass(frozen=True, config=CHECKED)
class Greso:
    """GRESO (Zheng et al. 2025): skip prompts by their run of zero-variance visits, before the rollout."""

    wants_signal: ClassVar[bool] = True

    target: Probability = 0.25
    """Wanted share of zero-variance groups among those rolled out; 1 always explores."""
    easy_share: Probability = 1 / 3
    """Part of `target` for easy prompts; the rest is for hard ones."""
    p_easy: Probability = 0.5
    p_hard: Probability = 0.5
    step: NonNegativeFloat = 0.01
    floor: Probability = 0.05
    cap: Probability = 1.0
    keep_floor: Probability = 0.0
    """Lowest probability to roll out a prompt. The authors' code has 0.01 here and a cap of 0.95; the paper neither."""

    def __post_init__(self) -> None:
        if self.step == 0:
            unused = ("target", "easy_share", "floor", "cap")
            refuse_unused(self, unused, "with step: 0, which keeps p_easy and p_hard; remove it")
        if self.step and not self.floor <= min(self.p_easy, self.p_hard) <= max(self.p_easy, self.p_hard) <= self.cap:
            raise ValueError(f"p_easy and p_hard must lie between floor={self.floor} and cap={self.cap}")

    def charts(self, name: str) -> list[Chart]:
        lines = {"greso/p_easy": "easy", "greso/p_hard": "hard"}
        return [Chart("Base probabilities of GRESO", lines, share=True)]

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> GresoSelector:
        return GresoSelector(prompts, seed, self, judge)


class GresoState(TraceState):
    p: Annotated[tuple[Probability, Probability], Loose]
    seen: list[float] = Field(min_length=len(JUDGED), max_length=len(JUDGED))


class GresoSelector(TraceSelector):
    """Selector of GRESO. Five bytes per prompt for the trace and four for the order of the epoch."""

    state_model = GresoState

    def __init__(self, prompts: Sequence[Prompt], seed: int, options: Greso, judge: GroupJudge) -> None:
        super().__init__(prompts, seed, judge)
        self.options = options
        self.p = options.p_easy, options.p_hard
        """Base probabilities of easy and of hard prompts."""
        self.seen = [0.0] * len(JUDGED)
        """Groups rolled out in this step, by kind, each weighted by its share of known rewards."""

    def _keep_probability(self, ordinals_N: np.ndarray) -> np.ndarray:
        base_N = np.array([1.0, *self.p])[self.kind_N[ordinals_N]]
        keep_N: np.ndarray = 1.0 - skip_probability(self.z_N[ordinals_N], base_N)
        return np.maximum(keep_N, self.options.keep_floor)

    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        return self.draws(ordinals_N, epoch) < self._keep_probability(ordinals_N)

    def verdict_on(self, ordinal: int, keep: bool) -> Verdict:
        z = float(self.z_N[ordinal])
        if z == 0:
            return KEEP
        p = max((1.0, *self.p)[self.kind_N[ordinal]] ** z, self.options.keep_floor)
        if keep:
            return Verdict(True, probability=p)
        kind = "easy" if self.kind_N[ordinal] == EASY else "hard"
        return Verdict(False, f"greso: {kind}, {z:g} zero-variance visits in a row", 1 - p)

    def _judged(self, group: Group, kind: GroupKind) -> None:
        """Count for the controller the visits it let through; forced ones would be read as exploration."""
        if kind is GroupKind.UNKNOWN and group.verdict.keep:
            kind = GroupKind.HARD  # as in the trace
        if group.visit.verdict.override_probability is None:
            self.seen[JUDGED.index(kind)] += share_seen(group) if group.verdict.keep else 1

    def end_step(self) -> None:
        """Adjust both base probabilities, once the first epoch is over."""
        super().end_step()
        total, o = sum(self.seen), self.options
        if self.epoch >= 1 and total:
            (p_easy, p_hard), (_, easy, hard, _) = self.p, self.seen
            p_easy = adjust(p_easy, easy / total, o.target * o.easy_share, o.step, o.floor, o.cap)
            p_hard = adjust(p_hard, hard / total, o.target * (1 - o.easy_share), o.step, o.floor, o.cap)
            self.p = p_easy, p_hard
        self.seen = [0.0] * len(JUDGED)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"greso/p_easy": self.p[0], "greso/p_hard": self.p[1]}
