"""Probe, then commit: a few siblings first, and the others only where the first ones showed a signal.

A group whose probe has equal rewards costs `probe` rollouts instead of `num_generations`; one with a signal gets all.
SPEED-RL (arXiv 2506.09016) screens so with 4, Pilot-Commit (arXiv 2605.26606) with 2 of 8.

What stopping does to the gradient: with rewards 0 and 1 a prompt's expected gradient keeps its direction, the gradient
of its pass rate p, and only its weight changes (docs/sequential.md). Prompts near p = 0 and p = 1 lose weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...base.options import CHECKED
from ...types import Group, GroupKind
from ..base import RunFacts
from .base import GroupSize


@dataclass(frozen=True, config=CHECKED)
class Sequential:
    """Roll out `probe` siblings; where their rewards differ, also the others, up to `num_generations`.

    The others are sampled by the policy of their time, and every token keeps its version.
    """

    probe: Annotated[int, Field(ge=2)] = 4

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.config.gates:
            yield "gates compare the siblings of a group, but here they are rolled out in two parts; use one of the two"
        if run.greedy_baseline:
            yield f"advantage: {run.config.advantage} needs a greedy rollout a group; use another advantage"

    def build(self, num_generations: int) -> SequentialSize:
        """Build the rule. Raises ValueError unless probe < num_generations."""
        if self.probe >= num_generations:
            raise ValueError(f"probe={self.probe} must be below num_generations={num_generations}")
        return SequentialSize(self.probe, num_generations)


class SequentialSize(GroupSize):
    in_parts = True

    def __init__(self, probe: int, size: int) -> None:
        self.smallest, self.largest = probe, size

    def next(self) -> int:
        return self.smallest

    def more(self, group: Group, kind: GroupKind) -> int:
        """Where too few siblings of the probe have a reward to tell, the others decide."""
        undecided = kind is GroupKind.NOT_JUDGED and any(rollout.reward is not None for rollout in group.rollouts)
        return self.largest - self.smallest if undecided or kind is GroupKind.SIGNAL else 0
