"""Rules as they are published: what a gate has learned decides elsewhere to the last bit, audits included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from winnow.config.options import method
from winnow.methods.gate import (
    GATES,
    Gate,
    GateContext,
    NamedRule,
    RuleError,
    check_rule,
    env_steps,
    rule_from,
    rule_state,
)
from winnow.methods.gate.base import ALONE, OVERRIDE, Overrides
from winnow.types import Decision, EnvStep, Fate, Group, GroupView, Prompt, Token, Verdict, Visit

from ..builders.arrol import rollout, view
from ..gates import plain

SIZE, H = 4, 6
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "divergence": ("divergence", {"k": 2, "threshold": 0.3}),
    "steps": ("divergence", {"steps": {1: 0.2, 3: 0.5}, "per_task_type": {"b": {2: 0.9}, "c": 0}}),
    "termination": ("divergence", {"k": 3, "termination": 0.5, "threshold": 0.1}),
    "random": ("random", {"k": 2, "share": 0.4}),
    "head": ("arrol", {"at": 4, "cold_start": 1}),
    "cold": ("arrol", {"at": 4}),
    "lengths": ("arrol", {"head_lr": 3e-4, "bins": 10, "cold_start": 1, "min_survivors": 0}),
    "distinct": ("arrol", {"at": 4, "cold_start": 1, "balance": "distinct"}),
}


def test_every_gate_is_here() -> None:
    assert {name for name, _ in CASES.values()} == set(GATES)


def views_of(rule: Any, first: int, groups: int = 24) -> list[list[GroupView]]:
    """By group, what it is asked about; of a token gate one view a sibling, else one a step."""
    found = []
    for number in range(first, first + groups):
        rng = np.random.default_rng(number)
        if isinstance(rule.at, Token):
            hidden, logps = rng.normal(size=(SIZE, H)), -rng.random(SIZE)
            found.append([view(number, i, SIZE, hidden[i], logp=logps[i], n=rule.at.n) for i in range(SIZE)])
            continue
        visit = Visit(number, 0, Prompt(f"p{number}", number, text="x", columns={"task_type": "abc"[number % 3]}))
        letters = "aab" if number % 2 else "abcdef"
        asked = []
        for k in env_steps(rule):
            actions = tuple(tuple(rng.choice(list(letters), size=int(rng.integers(1, k + 1)))) for _ in range(SIZE))
            asked.append(GroupView(visit, EnvStep(k), actions, actions, tuple(len(a) == k for a in actions), turn=k))
        found.append(asked)
    return found


def observed(gate: Gate, name: str, asked: list[GroupView], decisions: list[Decision]) -> None:
    """The group as the runner would give it back; odd siblings are right."""
    if asked[0].sibling is not None:
        members = [
            rollout(i, float(i % 2) if d.verdict.keep else None, d.verdict.probability, v.hidden)
            for i, (v, d) in enumerate(zip(asked, decisions, strict=True))
        ]
        for member, decision in zip(members, decisions, strict=True):
            member.decisions.append(decision)
        gate.observe_group(Group(asked[0].visit, members))
        return
    cut = any(not d.verdict.keep for d in decisions)
    same = asked[0].visit.number % 2
    members = [rollout(i, None if cut else 0.0 if same else float(i % 2)) for i in range(SIZE)]
    for member in members:
        member.fate = Fate.CUT if cut else None
    gate.observe_group(Group(asked[0].visit, members, decisions))


def built(case: str) -> Gate:
    """As a run builds it."""
    name, options = CASES[case]
    gate: Gate = method(GATES, {"name": name, **options}, "gates").build(GateContext(name, seed=3))
    return gate


def taught(case: str, steps: int = 3) -> Gate:
    name = CASES[case][0]
    gate: Gate = built(case)
    for step in range(steps):
        named = NamedRule(name, gate.rule())
        for asked in views_of(gate.rule(), 100 * step):
            observed(gate, name, asked, named.decide(asked))
        gate.end_step()
    return gate


def verdicts(named: NamedRule, groups: Sequence[Sequence[GroupView]]) -> list[Any]:
    return [plain(d.verdict) for asked in groups for d in named.decide(asked)]


@pytest.mark.parametrize("audited", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_a_rule_decides_the_same_after_a_journey(case: str, audited: bool) -> None:
    gate = taught(case)
    name = CASES[case][0]
    rule = gate.rule()
    named = NamedRule(name, rule, Overrides(name, 3, 1 / 3) if audited else None)
    text = json.dumps(rule_state(named), allow_nan=False)
    again = rule_from(json.loads(text), type(rule))
    assert (again.name, again.overrides) == (named.name, named.overrides)
    assert (again.rule.at, again.rule.needs) == (rule.at, rule.needs)
    assert json.dumps(rule_state(again), allow_nan=False) == text
    groups = views_of(rule, 5000, groups=60)
    told = verdicts(named, groups)
    assert verdicts(again, groups) == told
    removed = sum(not keep for keep, *_ in told)
    overridden = sum(by is not None for *_, by, _ in told)
    assert removed or case == "cold", "otherwise this proves little"
    assert (overridden > 0) == (audited and removed + overridden > 0)


def test_what_was_learned_is_in_the_rule() -> None:
    """A rule is as of the step it was made in, whatever the gate learns afterwards."""
    for case in ("head", "lengths"):
        gate = taught(case)
        name, rule = CASES[case][0], gate.rule()
        groups = views_of(rule, 5000)
        fresh = built(case).rule()
        before = verdicts(NamedRule(name, rule), groups)
        if fresh.at == rule.at:
            assert verdicts(NamedRule(name, fresh), groups) != before
        for asked in views_of(rule, 7000):
            observed(gate, name, asked, NamedRule(name, rule).decide(asked))
        gate.end_step()
        assert verdicts(NamedRule(name, rule), groups) == before


class Deterministic:
    """Removes; or keeps with the chance given."""

    at, needs = EnvStep(1), frozenset[str]()

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [self.verdict] * len(views)


def test_chances_to_come_through_several_decisions_multiply_to_survival() -> None:
    """A rule that cuts with 0.4 at each of two steps, under audit with 0.25: p + (1 - p) epsilon with p = 0.36."""
    epsilon, cut, keep = 0.25, Verdict(False, "cut", 0.4), Verdict(True, probability=0.6)
    both = keep_overridden = 0
    for number in range(400):
        visit = Visit(number, 0, Prompt(f"p{number}", number, text="x"))
        for first, second in ((keep, keep), (cut, keep), (keep, cut), (cut, cut)):
            taken: list[Decision] = []
            for verdict in (first, second):
                named = NamedRule("g", Deterministic(verdict), Overrides("g", 0, epsilon))
                asked = GroupView(visit, EnvStep(1), ((),), ((),), (True,), decisions=tuple(taken))
                (decision,) = named.decide([asked])
                taken.append(decision)
                assert decision.verdict.evidence[OVERRIDE] == epsilon
                assert decision.verdict.evidence[ALONE] == pytest.approx(0.6)
                if not decision.verdict.keep:
                    break
            chance = float(np.prod([d.verdict.probability for d in taken]))
            if taken[-1].verdict.keep:
                assert chance == pytest.approx(0.36 + 0.64 * epsilon)
            if first is cut and second is cut and taken[-1].verdict.keep:
                both += 1
                assert [d.verdict.override_probability for d in taken] == [epsilon, epsilon], "one draw for both"
            keep_overridden += first is keep and taken[-1].verdict.override_probability is not None
    assert 60 < both < 140, "one draw a group: 0.25 of 400"
    assert 60 < keep_overridden < 140


def test_an_override_keeps_the_probability_it_was_drawn_with() -> None:
    """A new rule may come between two checkpoints with another probability; the account needs the first."""
    visit = Visit(0, 0, Prompt("p0", 0, text="x"))
    drawn = Decision("g", EnvStep(1), Verdict(True, "audit: cut", 0.5, 0.5, {ALONE: 0.0, OVERRIDE: 0.5}), 1)
    asked = GroupView(visit, EnvStep(2), ((),), ((),), (True,), decisions=(drawn,))
    named = NamedRule("g", Deterministic(Verdict(False, "cut")), Overrides("g", 0, 1e-9))
    (later,) = named.decide([asked])
    assert (later.verdict.keep, later.verdict.override_probability, later.verdict.probability) == (True, 0.5, 1.0)
    others = Decision("h", EnvStep(1), drawn.verdict, 1)
    asked = GroupView(visit, EnvStep(2), ((),), ((),), (True,), decisions=(others,))
    (later,) = named.decide([asked])
    assert not later.verdict.keep, "those of another gate are none of its own"


def test_a_group_is_judged_where_it_was_to_be_asked_not_where_a_newer_rule_would() -> None:
    """Groups in flight keep their gate point when a rule with another comes; earlier turns count for copies, too."""
    spec = {"name": "arrol", "cold_start": 1, "balance": "distinct"}
    old, new = (method(GATES, spec | {"at": n}, "gates").build(GateContext("arrol")).rule() for n in (8, 2))
    asked = view(0, 0, 4, np.zeros(H), logp=-0.1, n=8)
    assert old.decide([asked])[0].evidence == new.decide([asked])[0].evidence
    (later,) = old.decide([replace(asked, logp_before=-50.0)])
    assert later.evidence["novelty"] == pytest.approx(1.0), "nobody else came this way"


@dataclass(frozen=True)
class Odd:
    """A rule that answers what it was told to."""

    answer: Any = None
    at: Any = field(default=EnvStep(1))
    needs: ClassVar[frozenset[str]] = frozenset()

    def decide(self, views: Sequence[GroupView]) -> Any:
        return self.answer(views) if callable(self.answer) else self.answer


def failing(views: Sequence[GroupView]) -> list[Verdict]:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (failing, "gate odd: KeyError: 'x'"),
        ([], "a list of 1 verdicts"),
        ([None], "a list of 1 verdicts"),
        (Verdict(True), "a list of 1 verdicts"),
        ([Verdict(True, probability=float("nan"))], "probability must lie in"),
        ([Verdict(True, probability=0.0)], "probability must lie in"),
        ([Verdict(True, evidence={"e": float("nan")})], "evidence 'e' must be a finite number"),
        ([Verdict(True, evidence={"e": [np.zeros(2)]})], "evidence 'e' must be a finite number"),
    ],
)
def test_a_rule_that_answers_nonsense_is_named(answer: Any, words: str) -> None:
    with pytest.raises(RuleError, match=f"gate odd.*{words}" if "gate" not in words else words):
        NamedRule("odd", Odd(answer)).decide([view(0, 0, 4, np.zeros(H))])


@pytest.mark.parametrize(
    "rule",
    [
        *(Odd(at=at) for at in (Token(0), EnvStep(0), (), (Token(2), Token(4)), (EnvStep(1), Token(2)), 3)),
        SimpleNamespace(at=Token(2), needs=frozenset()),
        Odd(answer=object()),
    ],
)
def test_a_rule_that_could_not_be_asked_or_sent_is_refused_at_the_start(rule: Any) -> None:
    with pytest.raises(RuleError, match=r"gate odd: (a rule's `at` must|its rule cannot travel)"):
        check_rule(NamedRule("odd", rule))
