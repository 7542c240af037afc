"""A learning rate that follows the share of mixed groups, those whose rewards differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from winnow.methods.correct import StepScale
from winnow.types import Group, GroupKind


@dataclass(frozen=True)
class MixedRate:
    """Times the last step's share of mixed groups over its mean so far, within bounds."""

    low: float = 0.5
    high: float = 2.0

    def build(self) -> MixedRateScale:
        return MixedRateScale(self)


class MixedRateScale(StepScale):
    """Also a callback, which gets the groups of each step; `speedrun/sides.py` adds it to the run."""

    def __init__(self, options: MixedRate) -> None:
        self.options = options
        self.factor = 1.0
        self.steps, self.sum_of_shares = 0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, *, groups: Sequence[Group] = (), **kwargs: Any) -> None:
        share = mixed_share(groups)
        if share is None:
            return
        self.steps += 1
        self.sum_of_shares += share
        if self.sum_of_shares:
            relative = share * self.steps / self.sum_of_shares
            self.factor = min(max(relative, self.options.low), self.options.high)

    def __call__(self, ess_ratio: float) -> float:
        return self.factor

    def metrics(self) -> dict[str, float]:
        return {"mixed_rate/factor": self.factor}


def mixed_share(groups: Sequence[Group]) -> float | None:
    """Return the share of mixed groups among those that were judged; None without any."""
    mixed = sum(group.kind is GroupKind.SIGNAL for group in groups)
    equal = sum(group.kind is not None and group.kind.zero_variance for group in groups)
    return mixed / (mixed + equal) if mixed + equal else None
