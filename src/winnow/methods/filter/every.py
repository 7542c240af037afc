"""Several filters in a row, as a list in the configuration: a group enters the batch if every one of them admits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...types import KEEP, Group, GroupKind, Verdict

if TYPE_CHECKING:
    from . import Filter


class Every:
    """Asks one after the other until one rejects; its name leads the reason. What any of them replaces, it replaces."""

    def __init__(self, filters: Sequence[tuple[str, Filter]]) -> None:
        """Pairs of name and filter; raises ValueError when one of them has no effect beside the others."""
        for i, (name, each) in enumerate(filters):
            if name == "keep_all":
                raise ValueError("keep_all has no effect beside other filters; remove it")
            if any(each == other for _, other in filters[:i]):
                raise ValueError(f"{name} is there twice; remove one")
        self.filters = tuple(filters)
        every = [each for _, each in filters]
        self.refill = any(each.refill for each in every)
        self.max_refill_rounds = max((each.max_refill_rounds for each in every if each.refill), default=0)
        self.wants_signal = any(each.wants_signal for each in every)

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        for name, each in self.filters:
            verdict = each.admit(group, kind)
            if not verdict.keep:
                return Verdict(False, f"{name}: {verdict.reason}")
        return KEEP
