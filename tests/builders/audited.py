"""Build groups with audited rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from winnow.methods.advantage import ADVANTAGES
from winnow.methods.gate.audit import RuleAudit, SkipAudit, load_with_audit, squared_advantages, state_with_audit
from winnow.methods.group_kind import GroupJudge
from winnow.methods.select import SELECTORS
from winnow.types import Group, Prompt, Visit

from .groups import make_group

JUDGE = GroupJudge(advantage=ADVANTAGES["grpo"]())


class Audited:
    """A selector or gate and its audit, called in the order in which the collector calls them."""

    def __init__(self, part: Any, audit: RuleAudit) -> None:
        self.part, self.audit = part, audit

    def select(self, n: int) -> list[Visit]:
        visits: list[Visit] = self.part.select(n, self.audit)
        return visits

    def observe_group(self, group: Group) -> None:
        self.part.observe_group(group)
        self.audit.observe_group(group, squared_advantages(group, JUDGE))

    def end_step(self) -> None:
        self.part.end_step()
        self.audit.end_step()

    def metrics(self) -> dict[str, float]:
        return {**self.part.metrics(), **self.audit.metrics()}

    def state_dict(self) -> dict[str, Any]:
        return state_with_audit(self.part, self.audit)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_with_audit(self.part, self.audit, state)


def build(name: str, prompts: list[Prompt], *, seed: int = 3, **audit: Any) -> Audited:
    options = {"epsilon": 0.3} | audit
    return Audited(SELECTORS[name]().build(prompts, seed=seed), SkipAudit(name, **options, seed=seed))


def answered(visit: Visit, teaches: bool) -> Group:
    return replace_visit(make_group(visit.number, [1.0, 0.0] if teaches else [0.0, 0.0]), visit)


def replace_visit(group: Group, visit: Visit) -> Group:
    return Group(visit, group.rollouts, group.decisions)
