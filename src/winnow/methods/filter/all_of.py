"""Several filters in a row, given as a list: a group enters the batch if all of them admit it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.state import at
from ...types import KEEP, Group, GroupKind, Verdict
from .base import Filter, checked_verdict


class AllOf(Filter):
    """Calls one filter after the other until one rejects; its name leads the reason.

    Rejected groups are replaced if any of the filters refills.
    """

    def __init__(self, filters: Sequence[tuple[str, Filter]]) -> None:
        """Take pairs of name and filter. Raises ValueError when one of them has no effect next to the others."""
        for i, (name, each) in enumerate(filters):
            if each.admits_all:
                raise ValueError(f"{name} has no effect with other filters; remove it")
            if any(each == other for _, other in filters[:i]):
                raise ValueError(f"{name} is listed twice; remove one")
        self.filters = tuple(filters)
        every = [each for _, each in filters]
        self.refill = any(each.refill for each in every)
        self.max_refill_rounds = max((each.max_refill_rounds for each in every if each.refill), default=0)
        self.wants_signal = any(each.wants_signal for each in every)
        self.atol = max(each.atol for each in every)

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        for name, each in self.filters:
            verdict = checked_verdict(each, group, kind)
            if not verdict.keep:
                return Verdict(False, f"{name}: {verdict.reason}")
        return KEEP

    def end_step(self) -> None:
        for _, each in self.filters:
            each.end_step()

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for _, each in self.filters:
            metrics |= each.metrics()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"filters": [each.state_dict() for _, each in self.filters]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for (name, each), of_filter in zip(self.filters, state["filters"], strict=True):
            with at(name):
                each.load_state_dict(of_filter)
