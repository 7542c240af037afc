"""Base class of filters."""

from __future__ import annotations

from ...base.errors import ConfigError
from ...types import Group, GroupKind, Verdict
from ..base import LearningMethod


class Filter(LearningMethod):
    """Decides after the reward whether a group enters the batch. To add a filter, derive from it and write `admit`.

    A filter with state has an options class with `build(seed) -> Filter` instead.
    """

    refill: bool = False
    """True: sample other prompts in place of rejected groups until the batch is full. False: train a smaller batch."""
    max_refill_rounds: int = 10
    """With `refill`: rounds in a row, each a batch's worth of groups, that may add nothing before the run stops."""
    wants_signal: bool = False
    """True: it drops groups with equal rewards, so an advantage that learns from them is refused."""
    admits_all: bool = False
    """True: it never rejects a group."""
    atol: float = 1e-8
    """Rewards this close count as equal in the whole run."""

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        """Decide on a finished group; called once. `kind`: what the group can teach.

        Not called for groups that a gate cut, or with too few rewards for the advantage.
        """
        raise NotImplementedError


def checked_verdict(filter_: Filter, group: Group, kind: GroupKind) -> Verdict:
    """Return `admit`. Raises ConfigError unless it is a verdict."""
    verdict = filter_.admit(group, kind)
    if not isinstance(verdict, Verdict):
        raise ConfigError(
            f"filter: {type(filter_).__name__}.admit returned {verdict!r}; return KEEP, or Verdict(False, reason)"
        )
    return verdict
