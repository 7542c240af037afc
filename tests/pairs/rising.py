"""A filter as a user writes one, named by its module: it learns, and has its state in every checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from winnow.base.state import State
from winnow.methods.filter import Filter
from winnow.types import KEEP, Group, GroupKind, Verdict


@dataclass(frozen=True)
class Rising:
    """Drop groups whose mean reward is below its moving average over steps."""

    decay: float = 0.5

    def build(self, seed: int) -> RisingFilter:
        return RisingFilter(self.decay)


class RisingState(State):
    level: float
    means: list[float]


class RisingFilter(Filter):
    state_model = RisingState

    def __init__(self, decay: float) -> None:
        self.decay, self.level = decay, 0.0
        self.means: list[float] = []

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        mean = float(np.nanmean(group.rewards()))
        self.means.append(mean)
        return KEEP if mean >= self.level else Verdict(False, "below the average")

    def end_step(self) -> None:
        if self.means:
            self.level = self.decay * self.level + (1 - self.decay) * float(np.mean(self.means))
        self.means = []

    def metrics(self) -> dict[str, float]:
        return {"rising/level": self.level}
