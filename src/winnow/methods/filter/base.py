"""Base class of filters."""

from __future__ import annotations

from ...types import Group, GroupKind, Verdict
from ..base import Learns


class Filter(Learns):
    """Decides after the reward whether a group enters the batch. To add a filter, derive from it and write `admit`.

    The options of a filter that learns have `build(context) -> Filter`, with the seed and the run's judge.
    """

    refill: bool = False
    """True: replace a rejected group until the batch is full. False: the batch gets smaller."""
    max_refill_rounds: int = 10
    """`refill` rounds in a row (a batch's worth of groups each) that may add nothing before the run stops."""
    wants_signal: bool = False
    """True: it drops groups with equal rewards, so the advantage must learn nothing from them."""
    admits_all: bool = False
    """True: it rejects no group."""
    atol: float = 1e-8
    """Rewards this close count as equal in the whole run."""

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        """Decide on a group that was not cut and has enough rewards; called once. `kind`: its kind of signal."""
        raise NotImplementedError
