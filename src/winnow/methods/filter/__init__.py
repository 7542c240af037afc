"""Filters: after the reward, does this group enter the batch?"""

from __future__ import annotations

from typing import Protocol

from ...types import Group, Verdict
from .keep_all import KeepAll
from .zero_variance import ZeroVariance


class Filter(Protocol):
    refill: bool
    """True: a rejected group is replaced until the batch is full. False: it leaves the batch smaller."""
    max_refill_rounds: int
    """With `refill`: rounds (a batch's worth of groups each) in a row that may add nothing before the run stops."""

    wants_signal: bool
    """True: groups whose advantages are all 0 are dropped too, whatever their rewards (max@k)."""

    def admit(self, group: Group) -> Verdict: ...


FILTERS: dict[str, type] = {"keep_all": KeepAll, "zero_variance": ZeroVariance}
