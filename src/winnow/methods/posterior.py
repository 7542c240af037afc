"""Beta posteriors of the prompts' pass rates, under a policy that changes.

Each prompt begins with the run's mean rate, worth `strength` rollouts, and counts its right and wrong ones. While the
policy changes a posterior becomes less sure, but keeps its mean: a prompt never solved rarely is the next time.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat

from ..base.array_json import Packed
from ..base.state import Count, State, Stateful
from ..types import Group, GroupKind
from .group_kind import GroupJudge


def mixed_probability(a: np.ndarray, b: np.ndarray, size: int) -> np.ndarray:
    """Return the chance that `size` rollouts are neither all right nor all wrong, at a rate from Beta(a, b).

    1 - E[p^G + (1 - p)^G] in closed form. float64 arrays that broadcast.
    """
    k = np.arange(size)
    total = np.add.outer(k, a + b)
    all_right, all_wrong = ((np.add.outer(k, each) / total).prod(0) for each in (a, b))
    mixed: np.ndarray = 1.0 - (all_right + all_wrong)  # a sum first, so that Beta(a, b) and Beta(b, a) are a tie
    return mixed


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

    def of(self, ordinals_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a and b of the prompts' Beta posteriors, float64 [N]."""
        a_N, b_N = self.a_N[ordinals_N].astype(np.float64), self.b_N[ordinals_N].astype(np.float64)
        worth_N = a_N + b_N
        unseen_N = worth_N == 0
        age_N = self.step - self.seen_at_N[ordinals_N].astype(np.float64)
        left_N = np.maximum(self.forget**age_N, self.strength / (worth_N + unseen_N))
        prior_a, prior_b = self.prior()
        return a_N * left_N + unseen_N * prior_a, b_N * left_N + unseen_N * prior_b

    def prior(self) -> tuple[float, float]:
        """Return a and b of a prompt never seen."""
        a = self.strength * self.all_right / self.all_rollouts
        return a, self.strength - a

    def add(self, ordinal: int, right: float, wrong: float) -> None:
        """Count rollouts of a prompt."""
        ordinals = np.array([ordinal])
        a, b = self.of(ordinals)
        self.a_N[ordinals], self.b_N[ordinals] = a + right, b + wrong
        self.seen_at_N[ordinals] = self.step
        self.all_right, self.all_rollouts = self.all_right + right, self.all_rollouts + right + wrong

    def end_step(self) -> None:
        """Forget: the policy has changed."""
        self.step += 1
        self.all_right = 1 + (self.all_right - 1) * self.forget
        self.all_rollouts = 2 + (self.all_rollouts - 2) * self.forget
