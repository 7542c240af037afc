"""Stop a random share of the groups at an environment step: the control arm that a gate must beat (appendix E.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from ...base.noise import noise_key, uniform_array
from ...config.options import CHECKED
from ...types import EnvStep, GroupView, Verdict
from .base import FixedGate, GateContext

RANDOM_STREAM = 5
"""Separates these draws from other noise."""


@dataclass(frozen=True, config=CHECKED)
class RandomCut:
    """Cut groups at random at an environment step, as a control for other gates."""

    k: PositiveInt = 10
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Probability to cut a group that still runs at step k."""

    def build(self, context: GateContext) -> FixedGate:
        return FixedGate(context.name, RandomCutRule(self.k, self.share, context.seed))


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
