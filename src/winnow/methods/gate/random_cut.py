"""Stop a random share of the groups at an environment step: the control arm that a gate must beat (appendix E.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from ...base.noise import noise_key, uniform_array
from ...config.options import CHECKED
from ...types import EnvStep, Group, GroupView, Verdict
from .base import Gate, GateContext, of_gate

RANDOM_STREAM = 5
"""Separates these draws from other noise."""


@dataclass(frozen=True, config=CHECKED)
class RandomCut:
    """Cut groups at random at an environment step, as a control for other gates."""

    k: PositiveInt = 10
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Probability to cut a group that still runs at step k."""

    def build(self, context: GateContext) -> RandomCutGate:
        return RandomCutGate(self, context)


@dataclass(frozen=True)
class RandomCutRule:
    """Draws that are functions of seed, prompt and epoch, independent of concurrent groups."""

    k: int
    share: float
    seed: int

    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def at(self) -> EnvStep:
        return EnvStep(self.k)

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [self._decide(view) for view in views]

    def _decide(self, view: GroupView) -> Verdict:
        key = noise_key(self.seed, RANDOM_STREAM, view.visit.prompt.ordinal, view.visit.epoch)
        if uniform_array(key, np.array([self.k])).item() < self.share:
            return Verdict(False, f"random cut at step {self.k}", self.share)
        return Verdict(True, probability=1 - self.share)


class RandomCutGate(Gate):
    """Counts decisions; nothing to learn."""

    def __init__(self, options: RandomCut, context: GateContext) -> None:
        self._rule = RandomCutRule(options.k, options.share, context.seed)
        self.name = context.name
        self._decisions = self._cut = 0

    def rule(self) -> RandomCutRule:
        return self._rule

    def observe_group(self, group: Group) -> None:
        for decision in of_gate(group.decisions, self.name):
            self._decisions += 1
            self._cut += decision.verdict.removes

    def end_step(self) -> None:
        self._decisions = self._cut = 0

    def metrics(self) -> dict[str, float]:
        """Return the number of decisions on this step's groups and the share that cut; empty without decisions."""
        if not self._decisions:
            return {}
        metrics = {"asked": float(self._decisions), "cut_share": self._cut / self._decisions}
        return {f"gate/{self.name}/{name}": value for name, value in metrics.items()}
