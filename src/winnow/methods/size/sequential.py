"""Probe, then commit: a few siblings first, and the others only where the first ones showed a signal.

A group whose probe has equal rewards costs `probe` rollouts instead of `num_generations`; one with a signal gets all.
SPEED-RL (arXiv 2506.09016) screens so with 4, Pilot-Commit (arXiv 2605.26606) with 2 of 8. With `hard_size` a group
without a right answer goes on until it has one, and with `balanced` every group until half of `num_generations` are
right and half wrong (Reinforce-Ada, arXiv 2510.04996, positive-focused and balanced; there a part of them is trained).

What stopping does to the gradient: with rewards 0 and 1 a prompt's expected gradient keeps its direction, the gradient
of its pass rate p, and only its weight changes (docs/sequential.md). Prompts near p = 0 and p = 1 lose weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from ...base.options import CHECKED
from ...types import Group, GroupKind, Prompt
from ..base import RunFacts
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

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.config.gates:
            yield "gates compare the siblings of a group, but here they are rolled out in two parts; use one of the two"
        if run.greedy_baseline:
            yield f"advantage: {run.config.advantage} needs a greedy rollout a group; use another advantage"

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
        return SequentialSize(self.probe, num_generations, hard_size)


class SequentialSize(GroupSize):
    in_parts = True

    def __init__(self, probe: int, size: int, hard_size: int) -> None:
        self.smallest, self.largest = probe, max(size, hard_size)
        self.size, self.hard_size = size, hard_size

    def next(self, prompt: Prompt) -> int:
        return self.smallest

    def more(self, group: Group, kind: GroupKind) -> int:
        """Where too few siblings have a reward to tell, the others decide."""
        have = len(group.rollouts)
        undecided = kind is GroupKind.NOT_JUDGED and any(rollout.reward is not None for rollout in group.rollouts)
        if undecided or kind is GroupKind.SIGNAL:
            return max(0, self.size - have)
        return min(self.smallest, self.hard_size - have) if kind is GroupKind.HARD else 0


class BalancedSize(SequentialSize):
    def more(self, group: Group, kind: GroupKind) -> int:
        rewards = group.rewards()
        known = rewards[~np.isnan(rewards)]
        if len(known) == 0:
            return 0
        fewest = min((known > known.mean()).sum(), (known < known.mean()).sum())
        return 0 if fewest >= self.size // 2 else min(self.smallest, self.hard_size - len(group.rollouts))
