"""Beta posteriors of the prompts' pass rates, under a policy that changes.

Each prompt begins with the run's mean rate, worth `strength` rollouts, and counts its right and wrong ones. While the
policy changes a posterior becomes less sure, but keeps its mean: a prompt never solved rarely is the next time.
`Predictions` compares the posteriors with the groups that followed.
"""

from __future__ import annotations

from dataclasses import replace
from math import comb
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat

from ..base.array_json import Packed
from ..base.state import Count, State, Stateful
from ..types import Group, GroupKind
from .base import Chart
from .group_kind import GroupJudge

TINY = 1e-30
"""Least a or b: that of a prompt never, or always, solved only shrinks, and 0 has no Beta distribution."""


def signal_probability(a: np.ndarray, b: np.ndarray, teaches: np.ndarray) -> np.ndarray:
    """Return the chance that a group has a signal, at a rate from Beta(a, b); float64 [N], [N] -> [N].

    `teaches`, bool [G + 1]: whether a group of G with so many right rollouts has one (`GroupJudge.teaching_counts`).
    The other counts are beta-binomial: E[C(G, r) p^r (1 - p)^(G - r)] in closed form.
    """
    size = len(teaches) - 1
    k = np.arange(size)
    right, wrong, total = (np.add.outer(k, each) for each in (a, b, a + b))
    without = [
        float(comb(size, r)) * (np.concatenate([right[:r], wrong[: size - r]]) / total).prod(0)
        for r in np.flatnonzero(~teaches).tolist()
    ]
    # A sum first, so that Beta(a, b) and Beta(b, a) are a tie; its rounding may exceed 1.
    signal: np.ndarray = np.maximum(1.0 - np.sum(without, axis=0), 0.0)
    return signal


def counts(group: Group, judge: GroupJudge) -> tuple[float, float]:
    """Return the right and the wrong rollouts of a group; failed, pruned, cut and undecided ones are absent.

    Where rewards differ but none or all are right, half of them count as right: such a group teaches.
    """
    judged = [judge.success.right(r) for r in group.siblings if r.reward is not None]
    right, wrong = float(judged.count(True)), float(judged.count(False))
    if not right * wrong and judge.kind(group) is GroupKind.SIGNAL:
        right = wrong = (right + wrong) / 2
    return right, wrong


class PosteriorsState(State, extra="ignore"):  # part of its owner's state
    a_N: Annotated[np.ndarray, Packed("f4", "prompts")] = Field(alias="a")
    b_N: Annotated[np.ndarray, Packed("f4", "prompts")] = Field(alias="b")
    seen_at_N: Annotated[np.ndarray, Packed("u4", "prompts")] = Field(alias="seen_at")
    step: Count
    all_right: NonNegativeFloat
    all_rollouts: NonNegativeFloat


class Posteriors(Stateful):
    """Posterior of every prompt. Twelve bytes per prompt."""

    state_model: ClassVar[type[State]] = PosteriorsState

    def __init__(self, prompts: int, *, forget: float, strength: float) -> None:
        """`forget`: what a rollout is worth a step later. `strength`: rollouts that the prior is worth, and to which
        what was seen of a prompt falls at most."""
        self.forget, self.strength = forget, strength
        self.a_N = np.zeros(prompts, np.float32)
        self.b_N = np.zeros(prompts, np.float32)
        """Posteriors after each prompt's last group, with the prior; 0 for prompts never seen."""
        self.seen_at_N = np.zeros(prompts, np.uint32)
        """Step of that group."""
        self.step = 0
        self.all_right, self.all_rollouts = 1.0, 2.0
        """Right rollouts and all, of all prompts, forgotten likewise."""

    def axes(self) -> dict[str, int]:
        return {"prompts": len(self.a_N)}

    def for_prompts(self, ordinals_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a and b of the prompts' Beta posteriors, float64 [N]."""
        a_N, b_N = self.a_N[ordinals_N].astype(np.float64), self.b_N[ordinals_N].astype(np.float64)
        worth_N = a_N + b_N
        unseen_N = worth_N == 0
        age_N = self.step - self.seen_at_N[ordinals_N].astype(np.float64)
        left_N = np.maximum(self.forget**age_N, self.strength / (worth_N + unseen_N))
        prior_a, prior_b = self.prior()
        a_N, b_N = a_N * left_N + unseen_N * prior_a, b_N * left_N + unseen_N * prior_b
        return np.maximum(a_N, TINY), np.maximum(b_N, TINY)

    def prior(self) -> tuple[float, float]:
        """Return a and b of a prompt never seen."""
        a = self.strength * self.all_right / self.all_rollouts
        return a, self.strength - a

    def add(self, ordinal: int, right: float, wrong: float) -> None:
        """Count rollouts of a prompt."""
        ordinals = np.array([ordinal])
        a, b = self.for_prompts(ordinals)
        self.a_N[ordinals], self.b_N[ordinals] = a + right, b + wrong
        self.seen_at_N[ordinals] = self.step
        self.all_right, self.all_rollouts = self.all_right + right, self.all_rollouts + right + wrong

    def end_step(self) -> None:
        """Forget: the policy has changed."""
        self.step += 1
        self.all_right = 1 + (self.all_right - 1) * self.forget
        self.all_rollouts = 2 + (self.all_rollouts - 2) * self.forget


class Predictions:
    """Chances that groups have a signal, by the posteriors of their pass rates, and which of them have one."""

    def __init__(self, judge: GroupJudge) -> None:
        self.judge = judge
        self._groups: list[tuple[float, float, int, bool]] = []
        """Of each group a and b before it, how many rewards it has, and whether it had a signal."""

    def add(self, group: Group, a: float, b: float, probe: int | None = None) -> None:
        """Compare a finished group with the posterior before it, Beta(a, b).

        `probe`: only so many siblings count. Later ones exist only where the first are mixed: they would leak it.
        """
        if probe is not None and probe < len(group.rollouts):
            group = replace(group, rollouts=group.siblings[:probe], kind=None)
        kind = self.judge.kind(group)
        if kind is not GroupKind.NOT_JUDGED:
            self._groups.append((a, b, len(group.known_rewards()), kind is GroupKind.SIGNAL))

    def metrics(self, name: str) -> dict[str, float]:
        """Return the mean chance, the share of groups with a signal (`mixed`), the Brier score, and the AUROC where
        there are both kinds.

        Only of groups that were rolled out: those that a selector prefers.
        """
        if not self._groups:
            return {}
        a_N, b_N, size_N, mixed_N = (np.array(column) for column in zip(*self._groups, strict=True))
        chance_N = np.empty(len(size_N))
        for size in np.unique(size_N).tolist():
            teaches, same = self.judge.teaching_counts(size), size_N == size
            chance_N[same] = signal_probability(a_N[same], b_N[same], teaches)
        metrics = {
            f"{name}/predicted": float(chance_N.mean()),
            f"{name}/mixed": float(mixed_N.mean()),
            f"{name}/brier": float(((chance_N - mixed_N) ** 2).mean()),
        }
        if 0 < mixed_N.sum() < len(mixed_N):
            metrics[f"{name}/auroc"] = auroc(chance_N, mixed_N)
        return metrics


def charts(name: str) -> list[Chart]:
    """Return the charts of `Predictions.metrics`."""
    shares = {f"{name}/predicted": "predicted", f"{name}/mixed": "observed"}
    quality = {f"{name}/auroc": "AUROC", f"{name}/brier": "Brier score"}
    return [
        Chart("Mixed groups among those rolled out", shares, share=True),
        Chart("How well mixed groups are predicted", quality, share=True),
    ]


def auroc(score_N: np.ndarray, label_N: np.ndarray, weight_N: np.ndarray | None = None) -> float:
    """Return the chance that a true one scores above a false one, ties counted half; needs both kinds."""
    weight_N = np.ones(len(score_N)) if weight_N is None else weight_N
    values, index_N = np.unique(score_N, return_inverse=True)
    positive_M = np.bincount(index_N, weight_N * label_N, minlength=len(values))
    negative_M = np.bincount(index_N, weight_N * ~label_N, minlength=len(values))
    below_M = np.cumsum(negative_M) - negative_M / 2
    return float(positive_M @ below_M / (positive_M.sum() * negative_M.sum()))


def midranks(value_N: np.ndarray, weight_N: np.ndarray | None = None) -> np.ndarray:
    """Return the weight of all lower values and half that of equal ones, float [N]; without weights, ranks from 1/2."""
    _, index_N = np.unique(value_N, return_inverse=True)
    per_M = np.bincount(index_N, weight_N)
    ranks: np.ndarray = (np.cumsum(per_M) - per_M / 2)[index_N]
    return ranks
