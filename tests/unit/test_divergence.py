"""The divergence gate: rules, options, and through the runner, the audit and a resumed run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.config.options import method
from winnow.engine import LocalEngine, SamplingParams
from winnow.env.base import StepResult
from winnow.env.rewards.rewarder import Rewarder
from winnow.methods.gate import GATES, GateContext
from winnow.methods.gate.audit import StopAudit
from winnow.methods.gate.divergence import Divergence, DivergenceRule
from winnow.methods.gate.signals import SIGNALS, table_rows
from winnow.methods.group_kind import GroupJudge
from winnow.record.ledger import Ledger
from winnow.record.step_metrics import Tally
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.study.gate_tables import read_recorded
from winnow.types import EnvStep, Fate, GroupView, Job, Token, Verdict, Visit

from ..builders.audited import Audited
from ..builders.divergence import Walk, digest, view_of
from ..builders.runs import metrics_of
from ..builders.toy_rollouts import SHORT_TURNS, EchoEnv, StepGate, ToyTask, run
from ..gates import Fake, ask, named


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


@dataclass
class NamedEnv(EchoEnv):
    """Understands the t-th action of sibling i as `names(i, t)`, whatever the model says."""

    names: Callable[[int, int], str] = lambda i, t: "look"
    sibling: int = 0

    def step(self, text: str) -> StepResult:
        result = super().step(text)
        return StepResult(result.observation, result.reward, result.done, action=self.names(self.sibling, self.steps))


def task_of(names: Callable[[int, int, int], str], turns: int = 4, size: int = 4, **options: Any) -> ToyTask:
    """`names(group, sibling, step)`; groups of `size` in launch order."""

    def make(made: int) -> NamedEnv:
        group, sibling = divmod(made, size)
        return NamedEnv(turns, names=lambda i, t: names(group, i, t), sibling=sibling)

    return ToyTask(make=make, stop=SHORT_TURNS, **options)


# The rule.


def test_the_rule_on_numbers() -> None:
    decides = DivergenceRule(Divergence(termination=0.9))
    for d, t in itertools.product([0.0, 0.119, 0.12, 0.5], [0.0, 0.89, 0.9, 1.0]):
        cut = d < 0.12 or t >= 0.9
        verdict = decides.converged({"x": d, "termination_fraction": t}, "x", 0.12, 7)
        assert verdict.keep == (not cut)
        assert ("at step 7" in verdict.reason) == cut


def test_the_reason_names_signal_value_threshold_and_step() -> None:
    values = {"action_entropy": 0.0625, "termination_fraction": 0.95}
    plain, either = DivergenceRule(Divergence()), DivergenceRule(Divergence(termination=0.9))
    below, ended = "action_entropy 0.0625 < 0.12", "termination_fraction 0.95 >= 0.9"
    assert plain.converged(values, "action_entropy", 0.12, 10).reason == f"converged: {below} at step 10"
    assert either.converged(values, "action_entropy", 0.05, 10).reason == f"converged: {ended} at step 10"
    assert plain.converged(values, "action_entropy", 0.0625, 10).keep, "strictly below"


def test_several_steps_and_task_types() -> None:
    gate = Divergence(steps={2: 0.3, 3: 0.5}, per_task_type={"heat": {3: 0.9}, "cool": 0}).build(
        GateContext("divergence")
    )
    assert gate.rule().at == (EnvStep(2), EnvStep(3))
    half = [["a", "b", "c"], ["a", "x", "c"]]  # 1/2 apart after two steps, 1/3 after three
    for kind, at_2, at_3 in (("other", True, False), ("heat", True, False), ("cool", True, True)):
        assert ask(gate, view_of(half, 2, {"task_type": kind})).keep == at_2
        assert ask(gate, view_of(half, 3, {"task_type": kind})).keep == at_3
    with pytest.raises(ValueError, match=r"column 'task_type'.*prompt 'p0' has only a"):
        ask(gate, view_of(half, 2, {"a": 1}))
    by_number = Divergence(k=2, per_task_type={"7": 0.9}, task_type="kind").build(GateContext("divergence"))
    assert not ask(by_number, view_of(half, 2, {"kind": 7})).keep


def test_failed_siblings_are_no_evidence() -> None:
    gate = Divergence(k=2, threshold=0.3).build(GateContext("divergence"))
    actions = [["a", "b"], ["a", "b"], [], []]
    assert ask(gate, view_of(actions, 2)).keep
    assert not ask(gate, view_of(actions, 2, absent=(False, False, True, True))).keep
    assert ask(gate, view_of(actions, 2, absent=(False, True, True, True))).keep, "one alone agrees with nobody"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signal": "prefix_edit_distanc"}, "Did you mean 'prefix_edit_distance'"),
        ({"k": 0}, "counts environment steps from 1"),
        ({"steps": {0: 0.1}}, "counts environment steps from 1"),
        ({"threshold": 1.2}, r"must lie in \[0, 1\]"),
        ({"threshold": float("nan")}, r"must lie in \[0, 1\]"),
        ({"steps": {5: -0.1}}, "threshold at step 5"),
        ({"steps": {5: 0.1}, "k": 12}, "no effect with steps"),
        ({"steps": {5: 0.1}, "per_task_type": {"a": 0.2}}, "steps of its own"),
        ({"termination": 0}, r"termination: .*greater than 0 "),
        ({"task_type": "kind"}, "no effect without per_task_type"),
        ({"per_task_type": {"a": 3.0}}, "must lie in"),
        ({"treshold": 0.1}, "Did you mean 'threshold'"),
        ({"steps": {"ten": 0.1}}, "steps"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method(GATES, {"name": "divergence", **options}, "gates")


def test_options_survive_json() -> None:
    spec = {"name": "divergence", "steps": {10: 0.12, 15: 0.2}, "per_task_type": {"heat": {12: 0.1}, "cool": 0}}
    assert method(GATES, json.loads(json.dumps(spec)), "gates") == method(GATES, spec, "gates")


# Through the runner.


def different(group: int, sibling: int, step: int) -> str:
    return f"{sibling} {step}"


def test_only_converged_groups_are_cut(policy: Any) -> None:
    task = task_of(lambda group, i, t: "look" if group == 1 else different(group, i, t))
    gate = Divergence(k=2).build(GateContext("divergence"))
    groups = run(policy, task, gates=[gate], max_tokens=200)
    assert [g.verdict.keep for g in groups] == [True, False, True]
    assert groups[1].verdict.reason == "converged: prefix_edit_distance 0 < 0.12 at step 2"
    for r in groups[1].rollouts:
        assert (r.fate, r.reward, len(r.turns), r.reason) == (Fate.CUT, None, 2, groups[1].verdict.reason)
    assert all(r.reward == 4.0 and r.fate is None for g in (groups[0], groups[2]) for r in g.rollouts)
    metrics = gate.metrics()
    assert metrics["gate/divergence/asked"] == 3
    assert metrics["gate/divergence/cut_share"] == pytest.approx(1 / 3)
    assert metrics["gate/divergence/prefix_edit_distance"] == pytest.approx(2 / 3)
    gate.end_step()
    assert gate.metrics() == {}


@pytest.mark.slow
def test_the_gate_sees_what_the_signals_are_defined_on(policy: Any) -> None:
    """The value in the reason is that of the recorded turns: model's text, or the environment's normal form."""
    for names in (None, different):
        task = task_of(names) if names else ToyTask(make=lambda _: EchoEnv(4), stop=SHORT_TURNS)
        for name, f in SIGNALS.items():
            if name == "termination_fraction":
                continue
            gate = Divergence(signal=name, k=3, threshold=1.0).build(GateContext("divergence"))
            for group in run(policy, task if names is None else task_of(names), gates=[gate], max_tokens=200):
                if group.verdict.keep:
                    continue
                turns = [[turn for turn in r.turns if turn.taken] for r in group.rollouts]
                actions = [[t.compared for t in ts] for ts in turns]
                value = f(actions, [[t.observation or "" for t in ts] for ts in turns], 3)
                assert group.verdict.reason == f"converged: {name} {value:.4g} < 1 at step 3"


def test_the_first_step_that_fires_cuts(policy: Any) -> None:
    """Group 0 agrees from the start, group 1 only after step 1 (distance 1/3 at step 3), group 2 never."""

    def names(group: int, i: int, t: int) -> str:
        return "look" if group == 0 or (group == 1 and t > 1) else different(group, i, t)

    groups = run(
        policy,
        task_of(names),
        gates=[Divergence(steps={1: 0.1, 3: 0.5}).build(GateContext("divergence"))],
        max_tokens=200,
    )
    assert [g.verdict.reason.rpartition(" ")[2] for g in groups] == ["1", "3", ""]
    assert [[len(r.turns) for r in g.rollouts] for g in groups] == [[1] * 4, [3] * 4, [4] * 4]


def test_it_acts_only_while_somebody_runs(policy: Any) -> None:
    """Everybody has ended by step 2, all alike: nothing is left to save, and the rewards count."""
    gate = Divergence(k=3).build(GateContext("divergence"))
    for group in run(policy, task_of(lambda g, i, t: "look", turns=2), gates=[gate], max_tokens=200):
        assert group.verdict.keep
        assert all(r.reward == 2.0 for r in group.rollouts)
    assert gate.metrics() == {}


def test_gates_at_the_same_step_are_asked_one_after_the_other(policy: Any) -> None:
    first, second, third = StepGate(2, True), StepGate(2, False), StepGate(2, False)
    task = task_of(different)
    groups = run(policy, task, gates=[first, second, third], max_tokens=200)
    assert [len(g.views) for g in (first, second, third)] == [3, 3, 0]
    assert all([len(r.turns) for r in g.rollouts] == [2] * 4 for g in groups)


def test_a_step_that_no_episode_reaches_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"after 5 environment steps.*at most 5 turns"):
        run(policy, task_of(different), gates=[Divergence(steps={2: 0.1, 5: 0.1}).build(GateContext("divergence"))])


def test_who_waits_holds_no_slot_and_its_time_is_counted(policy: Any) -> None:
    """Siblings 1-3 end their turns at once; sibling 0 talks on, and meanwhile the engine has only it."""
    engine = LocalEngine(*policy, slots=4)
    task = task_of(different)
    rewarder = Rewarder(task.reward_funcs)
    options = RolloutOptions(SamplingParams(300), 32, seed=0)
    runner = RolloutRunner(engine, task, policy[1], rewarder, {"train": options}, named([StepGate(2, True)]))
    runner.launch(Job(Visit(0, 0, task.train[0]), 4))
    groups, alone = [], 0
    while runner.pending:
        for flight in runner._flights.values():
            waiting = sum(s.waiting_since is not None for s in flight.siblings)
            running = sum(s.running for s in flight.siblings)
            assert engine.pending == running - waiting
            alone += waiting > 0
        groups += runner.poll()
    rewarder.close()
    assert alone, "somebody waited"
    waits = [r.barrier_wait_s for r in groups[0].rollouts]
    assert max(waits) > 0
    assert min(waits) >= 0
    tally = Tally(GroupJudge())
    tally.finished(groups[0])
    assert tally.metrics()["barrier_wait_s"] == pytest.approx(sum(waits))
    free = run(policy, task_of(different), max_tokens=300)
    assert all(r.barrier_wait_s == 0 for g in free for r in g.rollouts)


class PruneFirst(Fake):
    """Prunes the first siblings of a group in the middle of their first turn."""

    at = Token(2)

    def __init__(self, siblings: int) -> None:
        self.siblings = siblings

    def decide(self, view: GroupView) -> Verdict:
        assert view.sibling is not None
        return Verdict(view.sibling >= self.siblings, "pruned")


@pytest.mark.parametrize("pruned", [2, 4])
def test_pruned_siblings_are_no_evidence_either(policy: Any, pruned: int) -> None:
    """Eight that do the same, of which some were stopped: those that are left agree."""
    gate, seen = Divergence(k=2).build(GateContext("divergence")), StepGate(2, True)
    task = task_of(lambda g, i, t: "look", size=8)
    task.stop = ()
    groups = run(policy, task, gates=[PruneFirst(pruned), seen, gate], size=8, max_tokens=400)
    for group, view in zip(groups, seen.views, strict=True):
        left = [r for r in group.rollouts if r.fate != Fate.PRUNED]
        assert len(left) == 8 - pruned
        assert view.absent == (True,) * pruned + (False,) * (8 - pruned)
        (verdict,) = (d.verdict for d in group.decisions if d.gate == "divergence")
        assert verdict.evidence == {"prefix_edit_distance": 0.0}
        assert verdict.reason == "converged: prefix_edit_distance 0 < 0.12 at step 2"
        assert {r.fate for r in left} == {Fate.CUT}
    assert gate.metrics()["gate/divergence/prefix_edit_distance"] == 0.0


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("pruned", [2, 4])
def test_to_be_pruned_is_not_to_have_ended(policy: Any, pruned: int) -> None:
    gate = Divergence(k=2, termination=pruned / 8, threshold=0.0).build(GateContext("divergence"))
    task = task_of(different, size=8)
    task.stop = ()
    groups = run(policy, task, gates=[PruneFirst(pruned), gate], size=8, max_tokens=400)
    for group in groups:
        assert sum(r.fate == Fate.PRUNED for r in group.rollouts) == pruned
        assert group.verdict.keep
        assert sum(r.reward == 4.0 for r in group.rollouts) == 8 - pruned
    assert gate.metrics()["gate/divergence/asked"] == 3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_half_an_action_is_no_step(policy: Any, k: int) -> None:
    """Some siblings use up their tokens within their k-th action: they have taken k - 1 steps and ended.

    So a gate sees it in the run, and so the table has it that is recorded without one.
    """
    seen = StepGate(k, True)
    gates = [seen, Divergence(k=k, threshold=0.0).build(GateContext("divergence"))]
    task = task_of(lambda g, i, t: "look", turns=4, size=8)
    task.stop = ()
    groups = run(policy, task, gates=gates, size=8, max_tokens=30)
    half = 0
    for view in seen.views:
        group = groups[view.visit.number]
        whole = [[t for t in r.turns if t.stop_reason != "length"] for r in group.rollouts]
        half += sum(len(own) == k - 1 and len(r.turns) == k for own, r in zip(whole, group.rollouts, strict=True))
        assert [len(a) for a in view.actions] == [min(len(own), k) for own in whole]
        assert {action for actions in view.actions for action in actions} <= {"look"}, "no fragment is compared"
        (row,) = table_rows(group, [k])
        (verdict,) = (d.verdict for d in group.decisions if d.gate == "divergence")
        ended = sum(len(own) < k for own in whole) / 8
        assert row["termination_fraction"] == ended
        assert row["prefix_edit_distance"] == verdict.evidence["prefix_edit_distance"]
        assert (row["steps"], row["steps_k"]) == (
            sum(len(own) for own in whole),
            sum(min(len(own), k) for own in whole),
        )
    assert half, "otherwise this proves nothing"


@pytest.mark.parametrize("epsilon", [1.0, 0.5])
def test_an_overridden_cut_is_one_removal_whatever_the_steps(policy: Any, epsilon: float) -> None:
    gate = Audited(
        Divergence(steps={1: 0.1, 3: 0.1}).build(GateContext("divergence")), StopAudit("divergence", epsilon)
    )
    groups = run(policy, task_of(lambda g, i, t: "look"), gates=[gate], max_tokens=200)
    audited = [g for g in groups if g.verdict.keep]
    assert gate.audit.whole.audited == len(audited)
    assert gate.audit.whole.removed == 3 - len(audited)
    assert len(audited) == 3 if epsilon == 1.0 else 0 < len(audited) < 3
    for group in audited:
        assert [(len(r.turns), r.survival_p) for r in group.rollouts] == [(4, epsilon)] * 4
    later = sum(t.stop - t.start for g in audited for r in g.rollouts for t in r.turns[1:])
    assert gate.audit.whole.tokens.wy == pytest.approx((1 / epsilon - 1) * later), "from the first step that fired"


# In a run.


def test_a_task_of_one_turn_refuses_the_gate_at_the_start(tiny_config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"after 10 environment steps.*task countdown has at most 1 turn"):
        Trainer(config=tiny_config | {"gates": ["divergence"]})


def test_a_task_type_that_no_prompt_has_is_refused(tiny_config: dict[str, Any]) -> None:
    gate = {"name": "divergence", "k": 2, "per_task_type": {"heat": 0.1}}
    with pytest.raises(ConfigError, match="no training prompt has task_type 'heat'; types in the data: a, b"):
        Trainer(env=Walk(), config=tiny_config | {"gates": [gate], "eval_steps": None})


def test_a_resumed_run_is_the_uninterrupted_one(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    """And its table of groups has the weights of audits, so that `winnow gate` can read it."""
    gate = {"name": "divergence", "steps": {1: 0.05, 3: 0.2}, "per_task_type": {"b": {2: 0.1}}}
    config = tiny_config | {
        "gates": [gate],
        "audit": {"epsilon": 0.3},
        "max_completion_length": 120,
        "eval_steps": None,
    }
    whole = config | {"output_dir": str(tmp_path / "whole")}
    Trainer(env=Walk(), config=whole).train()
    half = config | {"output_dir": str(tmp_path / "half"), "max_steps": 2}
    Trainer(env=Walk(), config=half).train()
    Trainer.resume(tmp_path / "half", {"max_steps": 4}, env=Walk()).train()
    assert digest(tmp_path / "half") == digest(tmp_path / "whole")
    with Ledger.open(tmp_path / "whole" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["cut"]["rollouts"] > 0
    assert (tmp_path / "half" / "gate.jsonl").read_bytes() == (tmp_path / "whole" / "gate.jsonl").read_bytes()
    weights = set(read_recorded(tmp_path / "whole")[2].weights_N.tolist())
    assert 1.0 in weights
    assert max(weights) >= 1 / 0.3 - 1e-9
    lines = metrics_of(tmp_path / "whole")
    assert any(line.get("barrier_wait_s", 0) > 0 for line in lines)
    assert any("audit/divergence/removed" in line for line in lines)
