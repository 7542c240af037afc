"""A selector under audit: some of its skips are rolled out to measure the signal they would have lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...base.state import at
from ...types import Group, Visit
from ..gate.audit import RuleAudit, squared_advantages
from ..group_kind import GroupJudge
from ..pass_rates import PassRate
from .stream import StreamSelector


class AuditedSelector:
    """Wraps a selector: its skips are overridden as `audit` draws, by (epoch, prompt).

    An overridden skip is one of the `n` visits of `select`. Its group is like any other: the selector learns from it,
    and the run trains on it. `judge` is the run's, with its advantage.
    """

    def __init__(self, selector: StreamSelector, audit: RuleAudit, judge: GroupJudge) -> None:
        self.selector = selector
        self.audit = audit
        self.judge = judge
        selector.audit = audit

    def select(self, n: int) -> list[Visit]:
        return self.selector.select(n)

    def observe(self, group: Group) -> None:
        """Let the selector learn first, also from overridden skips; then keep the account."""
        self.selector.observe(group)
        probability = group.visit.verdict.overridden
        signal_G = squared_advantages(group, self.judge)
        if signal_G is None:
            return
        if probability is None:
            self.audit.kept(float(signal_G.sum()))
        else:
            tokens = float(sum(r.action_mask.sum() for r in group.rollouts))
            self.audit.audited(probability, float(signal_G.sum()), tokens)

    def wants_profile(self, step: int) -> int:
        return self.selector.wants_profile(step)

    def profiled(self, rates: Iterable[PassRate]) -> int:
        return self.selector.profiled(rates)

    def end_step(self) -> None:
        self.selector.end_step()
        self.audit.end_step()

    def metrics(self) -> dict[str, float]:
        return self.selector.metrics() | self.audit.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return selector and account; visits in flight carry their own verdicts."""
        return {"selector": self.selector.state_dict(), "audit": self.audit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with at("selector"):
            self.selector.load_state_dict(state["selector"])
        with at("audit"):
            self.audit.load_state_dict(state["audit"])
