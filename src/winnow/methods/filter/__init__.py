"""Filters: after the reward, does this group enter the batch?"""

from __future__ import annotations

from typing import Protocol

from ...types import Group, GroupKind, Verdict
from .every import Every
from .keep_all import KeepAll
from .zero_variance import ZeroVariance


class Filter(Protocol):
    """A filter of your own may derive from this and override `admit` alone."""

    refill: bool = False
    """True: a rejected group is replaced until the batch is full. False: it leaves the batch smaller."""
    max_refill_rounds: int = 10
    """Rounds of a `refill` (a batch's worth of groups each) in a row that may add nothing before the run stops."""

    wants_signal: bool = False
    """True: it drops what has no signal, so the advantage must be one under which equal rewards teach nothing."""

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        """Asked once about every group that was not cut and has enough rewards; `kind` is what it was judged to be."""
        ...


FILTERS: dict[str, type] = {"keep_all": KeepAll, "zero_variance": ZeroVariance}

__all__ = ["FILTERS", "Every", "Filter", "KeepAll", "ZeroVariance"]
