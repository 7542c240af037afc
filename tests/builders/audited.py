"""Build groups with audited rollouts."""

from __future__ import annotations

from typing import Any

from winnow.methods.advantage import ADVANTAGES
from winnow.methods.gate.audit import AuditedSelector, RuleAudit
from winnow.methods.group_kind import GroupJudge
from winnow.methods.select import SELECTORS
from winnow.methods.select.stream import StreamSelector
from winnow.types import Group, Prompt, Visit

from .groups import make_group

JUDGE = GroupJudge(advantage=ADVANTAGES["grpo"]())


def build(name: str, prompts: list[Prompt], *, seed: int = 3, **audit: Any) -> AuditedSelector:
    selector: StreamSelector = SELECTORS[name]().build(prompts, seed=seed)
    return AuditedSelector(selector, RuleAudit(name, **({"epsilon": 0.3} | audit), seed=seed), JUDGE)


def answered(visit: Visit, teaches: bool) -> Group:
    return replace_visit(make_group(visit.number, [1.0, 0.0] if teaches else [0.0, 0.0]), visit)


def replace_visit(group: Group, visit: Visit) -> Group:
    return Group(visit, group.rollouts, group.decisions)
