"""Selectors and gates under audit: overrides are visits and rollouts like any other, keyed, resumable."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.methods.advantage import ADVANTAGES
from winnow.methods.gate.audit import StopAudit, squared_advantages
from winnow.methods.group_kind import GroupJudge
from winnow.types import EnvStep, Fate, Group, GroupView, Prompt, Token, Verdict, Visit

from ..builders.audited import JUDGE, Audited, answered, build, replace_visit
from ..builders.groups import make_group
from ..builders.toy_rollouts import SHORT_TURNS, EchoEnv, ToyTask, run
from ..gates import Fake

PROMPTS = [Prompt(f"p{i}", i, text=str(i)) for i in range(40)]


@pytest.mark.parametrize("name", ["greso", "backoff"])
def test_overridden_skips_are_visits_like_any_other(name: str) -> None:
    selector = build(name, PROMPTS)
    visits, seen = [], {"audit: ": 0, "removed": 0, "kept": 0}
    for _ in range(60):
        got = selector.select(8)
        assert sum(v.verdict.keep for v in got) == 8, "exactly n are rolled out"
        visits += got
        for v in got:
            if not v.verdict.keep:
                seen["removed"] += 1
                continue
            audited = v.verdict.reason.startswith(f"audit: {name}")
            seen["audit: " if audited else "kept"] += 1
            assert 0 < v.verdict.probability <= 1
            selector.observe_group(answered(v, v.prompt.ordinal % 4 == 0))
        selector.end_step()
    assert [v.number for v in visits] == list(range(len(visits))), "consecutive"
    for epoch in range(visits[-1].epoch):
        assert sorted(v.prompt.ordinal for v in visits if v.epoch == epoch) == list(range(len(PROMPTS))), "nothing lost"
    metrics = selector.metrics()
    assert metrics[f"audit/{name}/audited"] == seen["audit: "] > 0
    assert metrics[f"audit/{name}/removed"] == seen["removed"] > 0
    assert metrics[f"audit/{name}/precision"] == 1.0, "these prompts never teach"
    assert metrics[f"audit/{name}/signal_lost"] == 0.0
    tokens = 8.0 * seen["removed"]
    assert metrics[f"audit/{name}/tokens_saved"] == pytest.approx(tokens), "two rollouts of four tokens each"
    assert 0.2 < seen["audit: "] / (seen["audit: "] + seen["removed"]) < 0.4
    assert metrics["epoch"] == selector.part.metrics()["epoch"]


def test_probabilities_are_those_of_survival() -> None:
    selector = build("greso", PROMPTS, epsilon=0.25)
    selector.part.z_N[:], selector.part.kind_N[:] = 2, 1  # kept with 0.5 ** 2, so with 0.25 + 0.75 * 0.25
    for v in selector.select(30):
        assert v.verdict.probability == pytest.approx(0.4375 if v.verdict.keep else 0.5625)
    deterministic = build("backoff", PROMPTS, epsilon=0.25)
    deterministic.part.z_N[:20] = 9
    found = {(v.verdict.keep, v.verdict.reason != ""): v.verdict.probability for v in deterministic.select(25)}
    assert found == {(True, False): 1.0, (True, True): 0.25, (False, True): 0.75}


@pytest.mark.parametrize("k", [0, 1, 7, 20])
def test_an_audited_selector_resumes_exactly(k: int) -> None:
    def go_on(selector: Audited, steps: int) -> list[Visit]:
        visits = []
        for _ in range(steps):
            visits += selector.select(6)
            for v in visits[-6:]:
                if v.verdict.keep:
                    selector.observe_group(answered(v, v.prompt.ordinal % 3 == 0))
            selector.end_step()
        return visits

    whole = build("greso", PROMPTS, max_signal_loss=0.2)
    go_on(whole, k)
    part = build("greso", PROMPTS, max_signal_loss=0.2)
    part.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert go_on(part, 10) == go_on(whole, 10)
    assert part.state_dict() == whole.state_dict()


def test_batching_changes_no_override() -> None:
    def visits(batches: list[int]) -> list[Visit]:
        selector = build("backoff", PROMPTS)
        selector.part.z_N[::2] = 60
        return [v for n in batches for v in selector.select(n)]

    assert visits([30]) == visits([1] * 30) == visits([7, 20, 3])


def test_a_long_history_hides_no_prompt() -> None:
    prompts = [Prompt(str(i), i, text="") for i in range(100_000)]
    selector = build("backoff", prompts, epsilon=0.02)
    selector.part.z_N[:] = np.where(np.arange(100_000) % 10, 50_000, 0)
    for n in (64, 384, 384):
        assert sum(v.verdict.keep for v in selector.select(n)) == n


def test_failures_are_no_evidence_and_other_rules_stops_have_no_signal() -> None:
    failed = make_group(0, [1.0, None, None])
    assert squared_advantages(failed, JUDGE) is None
    pruned = make_group(0, [1.0, None, None])
    for rollout in pruned.rollouts[1:]:
        rollout.fate = Fate.PRUNED
    assert squared_advantages(pruned, JUDGE).tolist() == [0.0, 0.0, 0.0]  # type: ignore[union-attr]
    mixed = squared_advantages(make_group(0, [1.0, 0.0, None]), JUDGE)
    np.testing.assert_allclose(mixed, [1.0, 1.0, 0.0], atol=1e-5)  # type: ignore[arg-type]
    close = make_group(0, [1.0, 0.95])
    assert squared_advantages(close, replace(JUDGE, atol=0.1)).tolist() == [0.0, 0.0], "as the run's filter has it"  # type: ignore[union-attr]
    greedy = make_group(0, [1.0, 0.0])
    assert squared_advantages(greedy, GroupJudge(advantage=ADVANTAGES["remax"]())) is None, "the greedy baseline failed"
    selector = build("backoff", PROMPTS, epsilon=1.0)
    selector.part.z_N[:] = 9
    for v in selector.select(4):
        selector.observe_group(replace_visit(make_group(v.number, [1.0, None]), v))
    assert selector.metrics()["audit/backoff/audited"] == 0


@pytest.fixture(scope="module")
def policy(tiny_model: Any) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


class Stops(Fake):
    """Stops odd siblings at token 3, or whole groups at step 2."""

    def __init__(self, at: Token | EnvStep, probability: float = 1.0) -> None:
        self.at, self.probability = at, probability
        self.observed: list[int] = []
        self.asked: list[tuple[int, int | None]] = []

    def decide(self, view: GroupView) -> Verdict:
        self.asked.append((view.visit.number, view.sibling))
        return Verdict(view.sibling is not None and view.sibling % 2 == 0, "stopped", self.probability)

    def observe_group(self, group: Group) -> None:
        self.observed.append(group.visit.number)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state == {"inner": 1}


def gated(policy: Any, task: ToyTask, gate: Fake, epsilon: float, **options: Any) -> tuple[Audited, list[Group]]:
    audited = Audited(gate, StopAudit("stops", epsilon))
    return audited, run(policy, task, gates=[audited], **options)


def test_an_overridden_sibling_runs_on_as_if_there_were_no_gate(policy: Any) -> None:
    free = run(policy, ToyTask())
    for epsilon in (1.0, 0.5):
        gate, groups = gated(policy, ToyTask(), Stops(Token(3)), epsilon)
        inner = gate.part
        stopped = [k for k in inner.asked if k[1] % 2]
        audited, tokens = 0, 0.0
        for group, undisturbed in zip(groups, free, strict=True):
            squares = squared_advantages(group, JUDGE)
            for r, same in zip(group.rollouts, undisturbed.rollouts, strict=True):
                if r.fate == Fate.PRUNED:
                    assert (r.survival_p, r.reward) == (1 - epsilon, None)
                    continue
                np.testing.assert_array_equal(r.token_ids, same.token_ids)
                was_stopped = (group.visit.number, r.sibling) in stopped
                assert r.survival_p == (epsilon if was_stopped else 1.0)
                audited += was_stopped
                tokens += was_stopped * (len(r.token_ids) - 3)
            assert squares is not None
        metrics = gate.metrics()
        assert metrics["audit/stops/audited"] == audited
        assert metrics["audit/stops/removed"] == len(stopped) - audited
        assert 0 < audited <= len(stopped)
        whole = gate.audit.whole
        assert whole.tokens.wy == pytest.approx((1 / epsilon - 1) * tokens)
        signal = [squared_advantages(g, JUDGE) for g in groups]
        assert whole.audited_signal + whole.kept_signal == pytest.approx(sum(float(s.sum()) for s in signal))  # type: ignore[union-attr]
        assert inner.observed == [0, 1, 2]


def test_a_random_gate_under_audit_keeps_its_survival_probabilities(policy: Any) -> None:
    """Kept or overridden: p + (1 - p) epsilon; and once a sibling, however many turns reach the token."""
    gate, groups = gated(policy, ToyTask(), Stops(Token(3), probability=0.6), 0.5)
    found = set()
    for group in groups:
        for r in group.rollouts:
            if (group.visit.number, r.sibling) in gate.part.asked:
                p = 0.6 if r.sibling % 2 == 0 else 0.4
                expected = p + (1 - p) * 0.5
                found.add(r.fate)
                assert r.survival_p == pytest.approx(1 - expected if r.fate == Fate.PRUNED else expected)
    assert found == {None, Fate.PRUNED}
    task = ToyTask(make=lambda _: EchoEnv(4))
    gate, groups = gated(policy, task, Stops(Token(2), probability=0.6), 0.5, max_tokens=300)
    asked = gate.part.asked
    assert max(asked.count(k) for k in asked) == 1
    survivors = 0
    for group in groups:
        for r in group.rollouts:
            if r.fate is None:
                p = 0.6 if r.sibling % 2 == 0 else 0.4
                was_asked = (group.visit.number, r.sibling) in asked
                assert r.survival_p == pytest.approx(p + (1 - p) * 0.5 if was_asked else 1.0)
                survivors += 1
    assert survivors
    assert gate.audit.whole.audited <= 12


@pytest.mark.parametrize("epsilon", [1.0, 0.5])
def test_an_overridden_group_runs_on_and_survives_as_one(policy: Any, epsilon: float) -> None:
    task = ToyTask(make=lambda made: EchoEnv(1 if made % 4 == 0 else 4), stop=SHORT_TURNS)
    gate, groups = gated(policy, task, Stops(EnvStep(2)), epsilon, max_tokens=200)
    audited = [g for g in groups if g.verdict.keep]
    assert gate.audit.whole.audited == len(audited)
    assert gate.audit.whole.removed == 3 - len(audited)
    assert len(audited) == 3 if epsilon == 1.0 else 0 < len(audited) < 3
    for group in audited:
        assert [r.reward for r in group.rollouts] == [1.0, 4.0, 4.0, 4.0]
        assert [r.survival_p for r in group.rollouts] == [epsilon] * 4, "also the one that had ended"
    later = sum(t.stop - t.start for g in audited for r in g.rollouts for t in r.turns[2:])
    assert gate.audit.whole.tokens.wy == pytest.approx((1 / epsilon - 1) * later)
    assert gate.audit.whole.audited_signal == pytest.approx(4.0 * len(audited), rel=1e-4)
    state = json.loads(json.dumps(gate.state_dict()))
    again = Audited(Stops(EnvStep(2)), StopAudit("stops", epsilon))
    again.load_state_dict(state)
    assert again.metrics() == gate.metrics()


def test_a_failed_sibling_is_no_evidence(policy: Any) -> None:
    task = ToyTask(make=lambda made: EchoEnv(2, fail_at=2 if made == 1 else None))
    gate, groups = gated(policy, task, Stops(Token(1)), 1.0, max_tokens=400)
    assert groups[0].rollouts[1].fate == Fate.FAILED
    assert gate.audit.whole.audited == 5, "six odd siblings, one of which failed"


def test_a_stop_by_another_gate_is_evidence_of_no_value(policy: Any) -> None:
    class StopsAll(Stops):
        def decide(self, view: GroupView) -> Verdict:
            return Verdict(False, "later")

    audited = Audited(Stops(Token(1)), StopAudit("stops", 1.0))
    run(policy, ToyTask(), gates=[audited, StopsAll(Token(3))])
    assert audited.audit.whole.audited > 0
    assert audited.audit.whole.precision().value > 0.5
