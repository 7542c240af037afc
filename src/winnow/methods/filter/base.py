"""The interface of filters."""

from __future__ import annotations

from ...types import Group, GroupKind, Verdict
from ..base import Learns


class Filter(Learns):
    """After the reward: does this group enter the batch? Derive from it and write `admit`; the rest has defaults.

    A filter that learns is built: its options have `build(context) -> Filter`, with the seed and the run's judge.
    """

    refill: bool = False
    """True: a rejected group is replaced until the batch is full. False: it leaves the batch smaller."""
    max_refill_rounds: int = 10
    """Rounds of a `refill` (a batch's worth of groups each) in a row that may add nothing before the run stops."""
    wants_signal: bool = False
    """True: it drops groups with equal rewards, so the advantage must learn nothing from those."""
    admits_all: bool = False
    """True: it rejects no group."""
    atol: float = 1e-8
    """Rewards this close count as equal in the whole run."""

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        """Decide on a group that was not cut and has enough rewards; asked once. `kind`: what it can teach."""
        raise NotImplementedError
