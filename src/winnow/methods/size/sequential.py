"""Probe, then commit: a few siblings first, and the others only where the first ones showed a signal.

A group whose probe has equal rewards costs `probe` rollouts instead of `num_generations`; one with a signal gets all.
SPEED-RL (arXiv 2506.09016) screens so with 4, Pilot-Commit (arXiv 2605.26606) with 2 of 8. With `hard_size` a group
without a right answer goes on until it has one, and with `balanced` every group until half of `num_generations` are
right and half wrong (Reinforce-Ada, arXiv 2510.04996, positive-focused and balanced; there a part of them is trained).

What stopping does to the gradient: with rewards 0 and 1 a prompt's expected gradient keeps its direction, the gradient
of its pass rate p, and only its weight changes (docs/sequential.md). Prompts near p = 0 and p = 1 lose weight;
`unbiased` restores it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from ...base.errors import ConfigError
from ...config.options import CHECKED, weighs_equally
from ...types import Group, GroupKind, Prompt
from ..agents import by_agent
from ..base import RunFacts
from ..group_kind import BY_REWARDS, GroupJudge, are_equal
from .base import GroupSize


@dataclass(frozen=True, config=CHECKED)
class Sequential:
    """Roll out `probe` siblings; where their rewards differ, also the others, up to `num_generations`.

    The others are sampled by the policy of their time, and every token keeps its version. A group of which none is
    right goes on, `probe` siblings at a time, until one is or it has `hard_size`; None, or where right answers are
    unknown (`success`): it stops after the probe. `balanced`: any group goes on so, up to `hard_size` (twice
    `num_generations`), until half of `num_generations` have rewards above the group's mean, and half below it.
    """

    probe: Annotated[int, Field(ge=2)] = 4
    hard_size: int | None = None
    balanced: bool = False
    unbiased: bool = False
    """Count each group that went on as 1 / (chance that a probe of its siblings does) groups (Horvitz and Thompson)."""

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.config.gates:
            yield "gates compare the siblings of a group, but here they are rolled out in two parts; use one of the two"
        if run.greedy_baseline:
            yield f"advantage: {run.names['advantage'][0]} needs a greedy rollout a group; use another advantage"
        if self.unbiased and (self.balanced or self.hard_size is not None):
            yield "unbiased supports a single probe only; remove it, or hard_size and balanced"
        c = run.config
        if self.unbiased and (c.beta or c.entropy_coef or c.teacher is not None):
            yield "unbiased weighs the rewards' gradient alone; remove it, or beta, entropy_coef and teacher"
        by_size = not weighs_equally(c.loss_type, c.group_weighting)
        if self.unbiased and by_size and not any(each.refill for each in run.filters):
            yield (
                "unbiased needs groups of one size in the loss's mean, but stopped ones are smaller or missing; set "
                "group_weighting: equal, or a filter that refills, e.g. filter: zero_variance"
            )

    def build(self, num_generations: int) -> SequentialSize:
        """Build the rule. Raises ValueError unless probe < num_generations, and probe < hard_size."""
        if self.probe >= num_generations:
            raise ValueError(f"probe={self.probe} must be below num_generations={num_generations}")
        default = 2 * num_generations if self.balanced else self.probe
        hard_size = default if self.hard_size is None else self.hard_size
        if self.hard_size is not None and hard_size <= self.probe:
            raise ValueError(
                f"hard_size={hard_size} must be above probe={self.probe}; without it hard groups stop there"
            )
        if self.balanced and hard_size < num_generations:
            raise ValueError(f"hard_size={hard_size} must not be below num_generations={num_generations} if balanced")
        if self.balanced:
            return BalancedSize(self.probe, num_generations, hard_size)
        return SequentialSize(self.probe, num_generations, hard_size, self.unbiased)


class SequentialSize(GroupSize):
    in_parts = True

    def __init__(self, probe: int, size: int, hard_size: int, unbiased: bool = False) -> None:
        self.smallest, self.largest = probe, max(size, hard_size)
        self.size, self.hard_size, self.unbiased = size, hard_size, unbiased
        self._judge = BY_REWARDS

    def begin(self, prompts: Sequence[Prompt], judge: GroupJudge) -> None:
        """Raises ValueError where `unbiased` cannot know by rewards alone which groups teach."""
        self._judge = judge
        advantage = judge.advantage
        if self.unbiased and (advantage is None or advantage.may_vanish or not advantage.group_relative):
            raise ValueError("unbiased needs advantage: rloo, grpo or dr_grpo, which are 0 only for equal rewards")

    def size_for(self, prompt: Prompt) -> int:
        return self.smallest

    def additional_size(self, group: Group, kind: GroupKind) -> int:
        """Where too few siblings have a reward to tell, the others decide."""
        have = len(group.rollouts)
        right = [self._judge.success.right(rollout) for rollout in group.siblings if rollout.reward is not None]
        undecided = kind is GroupKind.NOT_JUDGED and bool(right)
        if (undecided or kind is GroupKind.SIGNAL) and have < self.size:
            return self.size - have
        hard = bool(right) and not any(right) and None not in right
        return min(self.smallest, self.hard_size - have) if hard and have < self.hard_size else 0

    def observe_group(self, group: Group) -> None:
        """Give the siblings of a group that went on its chance to. Raises ConfigError for rewards of several agents."""
        if not self.unbiased or len(group.rollouts) <= self.smallest or not self._judge.teaches(group):
            return
        if any(rollout.agent_rewards for rollout in group.rollouts):
            raise ConfigError("group_size: unbiased needs one reward a rollout, but agents have their own; remove it")
        chance = 1 - chance_to_stop(group.known_rewards(), len(group.rollouts), self.smallest, self._judge)
        for rollout in group.rollouts:
            rollout.survival_p = chance


def chance_to_stop(rewards: Sequence[float], size: int, probe: int, judge: GroupJudge) -> float:
    """Return the share of the subsets of `probe` siblings that would end their group: equal rewards, or none at all.

    `rewards`: those that are known, of a group of `size`.
    """
    values, missing = sorted(rewards), size - len(rewards)
    stops = comb(missing, probe)
    for known in range(judge.least, probe + 1):
        # Subsets with equal rewards, each counted at its lowest: the others come after it, and are as high.
        equal = sum(
            comb(sum(are_equal((low, value), judge.atol) for value in values[i + 1 :]), known - 1)
            for i, low in enumerate(values)
        )
        stops += equal * comb(missing, probe - known)
    return stops / comb(size, probe)


class BalancedSize(SequentialSize):
    def additional_size(self, group: Group, kind: GroupKind) -> int:
        """Of agents with rewards of their own, the one that is best balanced counts."""
        if not group.known_rewards():
            return 0
        balanced = max(_fewer_side(of_one.known_rewards()) for of_one in by_agent([group])) >= self.size // 2
        return 0 if balanced else min(self.smallest, self.hard_size - len(group.rollouts))


def _fewer_side(rewards: Sequence[float]) -> int:
    """Return how many rewards are above their mean, or below it where those are fewer."""
    if not rewards:
        return 0
    known = np.array(rewards)
    return int(min((known > known.mean()).sum(), (known < known.mean()).sum()))
