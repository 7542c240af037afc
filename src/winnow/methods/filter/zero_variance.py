"""Drop groups without a signal: their group-relative advantages are all 0.

With `refill` this is DAPO's dynamic sampling (Yu et al. 2025, section 3.2): sampling continues until the batch is full,
bounded by `max_refill_rounds`. Without it, the loss runs over the surviving groups only.
"""

from __future__ import annotations

from statistics import fmean

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from ...config.options import CHECKED
from ...types import KEEP, Group, GroupKind, Verdict
from ..base import refuse_unused
from ..group_kind import are_equal
from .base import Filter


@dataclass(frozen=True, config=CHECKED)
class ZeroVariance(Filter):
    """Drop groups with equal rewards and sample others in their place (DAPO dynamic sampling, Yu et al. 2025)."""

    atol: NonNegativeFloat = 1e-8
    refill: bool = True
    max_refill_rounds: PositiveInt = 10
    wants_signal = True

    def __post_init__(self) -> None:
        if not self.refill:
            refuse_unused(self, ["max_refill_rounds"], "with refill: false; remove it")

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        if not kind.zero_variance:
            return KEEP
        rewards = group.known_rewards()
        if not are_equal(rewards, self.atol):
            return Verdict(False, "no signal: every advantage is 0")
        return Verdict(False, f"zero variance: all rewards are {fmean(rewards):g}")
