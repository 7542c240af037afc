"""ARRoL's gate: who survives, with what chance, what it learns from, and that none of it depends on the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from winnow.base.errors import ConfigError
from winnow.methods.gate.arrol.calibration import survival_factor
from winnow.methods.gate.arrol.gate import FIRST_DETECTION_TOKEN, Arrol, _sampled_after
from winnow.methods.gate.arrol.rule import forced_beyond
from winnow.methods.gate.base import GateContext, Overrides
from winnow.methods.group_kind import GroupJudge
from winnow.methods.success import default_success
from winnow.types import Decision, Token, Turn, Verdict

from ..builders.arrol import H, built, group_of, play, rollout, view
from ..gates import ask, plain


def test_nothing_is_pruned_while_it_is_cold_and_then_the_keep_rate_is_kept() -> None:
    gate = built(Arrol(at=4, cold_start=5, min_survivors=0))
    assert all(v.keep and v.probability == 1 for v in play(gate, 5))
    verdicts = play(gate, 30, seed=1)
    assert np.mean([v.keep for v in verdicts]) == pytest.approx(0.5, abs=0.05)
    assert any("pruned at token 4: predicted success" in v.reason for v in verdicts)


@pytest.mark.parametrize(("balance", "cold"), [("target", True), ("distinct", False)])
def test_nothing_is_pruned_by_success_once_it_is_unknown(balance: Any, cold: bool) -> None:
    judge = GroupJudge(default_success([], None))
    gate = Arrol(at=4, cold_start=1, balance=balance).build(GateContext("arrol", 0, judge))
    play(gate, 1)
    assert not gate.rule().cold
    judge.success.observe([rollout(0, 2.0)])
    assert gate.rule().cold == cold


def test_survivors_are_nearer_to_balance() -> None:
    gate = built(Arrol(at=4, cold_start=10, min_survivors=0))
    play(gate, 10)
    rng, kept, every = np.random.default_rng(9), [], []
    for number in range(400):
        hidden = rng.normal(size=H)
        label = rng.random() < 1 / (1 + np.exp(1.5 - 2 * hidden[0]))
        every.append(label)
        if ask(gate, view(5000 + number, 0, 1, hidden)).keep:
            kept.append(label)
    assert np.mean(every) < 0.4
    assert np.mean(every) + 0.05 < np.mean(kept) < 0.6


def test_order_changes_no_decision_within_a_step() -> None:
    forward, backward = (built(Arrol(at=4, cold_start=1), 3) for _ in range(2))
    play(forward, 1)
    play(backward, 1)
    a = play(forward, 1, seed=5)
    b = play(backward, 1, seed=5, order=-1)[::-1]
    assert [plain(v) for v in a] == [plain(v) for v in b]
    assert not all(v.keep for v in a)


def test_many_are_decided_as_one_by_one() -> None:
    gates = [built(Arrol(at=4, cold_start=1), 3) for _ in range(3)]
    rng = np.random.default_rng(2)
    views = [view(900 + i // 8, i % 8, 8, rng.normal(size=H), logp=-rng.random()) for i in range(96)]
    views[7] = view(900, 7, 8, np.full(H, np.nan), logp=float("nan"))
    for gate in gates:
        play(gate, 1)
    rule = gates[2].rule()
    alone = [ask(gates[0], v) for v in views]
    many = gates[1].rule().decide(views)
    some = [v for i in range(0, 96, 5) for v in rule.decide(views[i : i + 5])]
    assert {v.keep for v in alone} == {True, False}
    assert [plain(v) for v in alone] == [plain(v) for v in many] == [plain(v) for v in some]
    again = rule.decide([views[3], views[3]])
    assert [plain(v) for v in again] == [plain(alone[3])] * 2, "a rule remembers nothing"
    for gate, verdicts in zip(gates, (alone, many, some), strict=True):
        for number in range(12):
            members = enumerate(verdicts[8 * number : 8 * number + 8])
            rollouts = [rollout(i, float(i % 2) if v.keep else None, verdict=v) for i, v in members]
            gate.observe_group(group_of(900 + number, rollouts))
        gate.end_step()
    assert gates[0].state_dict() == gates[1].state_dict() == gates[2].state_dict()


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(("size", "least"), [(8, 2), (5, 1), (3, 3), (2, 2), (1, 2), (6, 0)])
def test_at_least_so_many_survive_and_the_chance_says_so(size: int, least: int) -> None:
    gate = built(Arrol(at=4, cold_start=1, keep_rate=0.3, min_survivors=least))
    play(gate, 1)
    gate._survival_B[:] = 0.3
    views = [view(10_000 + number, i, size, np.ones(H)) for number in range(3000) for i in range(size)]
    verdicts = gate.rule().decide(views)
    kept = np.array([v.keep for v in verdicts])
    assert kept.reshape(3000, size).sum(1).min() >= min(least, size)
    chances = [v.probability if v.keep else 1 - v.probability for v in verdicts]
    np.testing.assert_allclose(chances, 0.3 + forced_beyond(0.3, size, least), rtol=1e-6)
    assert kept.mean() == pytest.approx(0.3 + forced_beyond(0.3, size, least), abs=0.02)


def test_one_that_was_pruned_or_ended_early_has_no_scored_outcome() -> None:
    """That a rollout is asked about once is the runner's affair: test_audited.py."""
    gate = built(Arrol(at=4, cold_start=1, keep_rate=0.05, min_survivors=0))
    play(gate, 1)
    pruned = ask(gate, view(900, 0, 2, np.ones(H)))
    assert not pruned.keep
    before = gate._posterior.labels
    gate.observe_group(group_of(900, [rollout(0, None, verdict=pruned), rollout(1, 1.0)]))
    assert gate._posterior.labels == before, "nobody was scored at the checkpoint and came to an end"


def test_a_score_that_is_not_finite_survives_and_is_counted() -> None:
    gate = built(Arrol(at=4, cold_start=1, min_survivors=0))
    play(gate, 1)
    gate.head.weights.layers[3][:] = np.nan
    verdicts = [ask(gate, view(900, i, 2, hidden)) for i, hidden in enumerate((np.ones(H), np.full(H, np.inf)))]
    assert verdicts == [Verdict(True, "its score is not finite")] * 2
    gate.observe_group(group_of(900, [rollout(i, 1.0, verdict=v) for i, v in enumerate(verdicts)]))
    assert gate.metrics()["gate/arrol/not_finite"] == 2


@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_tokens_that_an_audit_rolled_out_are_not_saved(probability: float) -> None:
    """Of 4,000 rollouts, of which all go on that an override keeps."""
    gate = built(Arrol(at=4, cold_start=1, keep_rate=0.3, min_survivors=0))
    play(gate, 1)
    gate._survival_B[:] = 0.3
    overrides = Overrides("arrol", 0, probability)
    pruned = saved = 0.0
    for number in range(500, 1000):
        members = []
        for i in range(8):
            at = view(number, i, 8, np.ones(H))
            verdict = overrides.apply(at, ask(gate, at), [])
            pruned += not verdict.keep
            p = verdict.probability if verdict.keep else 1.0
            members.append(rollout(i, float(i % 2) if verdict.keep else None, survival_p=p, verdict=verdict))
        gate.observe_group(group_of(number, members))
    saved = gate.metrics().get("gate/arrol/tokens_saved", 0.0)
    assert saved == pytest.approx(4 * pruned, rel=0.1)  # four tokens follow the fourth


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_buffer_of_one_class_keeps_at_random(label: float) -> None:
    gate = built(Arrol(at=4, cold_start=1, min_survivors=0))
    for number in range(40):
        verdict = ask(gate, view(number, 0, 1, np.random.default_rng(number).normal(size=H)))
        gate.observe_group(group_of(number, [rollout(0, label, verdict=verdict)]))
    assert gate.metrics()["gate/arrol/asked"] == 40
    gate.end_step()
    np.testing.assert_allclose(gate._survival_B, 0.5)
    assert gate.metrics()["gate/arrol/asked"] == 0


def test_the_detection_length_follows_the_lengths() -> None:
    gate = built(Arrol(quantile=0.5, share=0.5))
    assert gate.rule().at == Token(16)
    gate.end_step()
    assert gate.rule().at == Token(16), "no length is known yet"
    for number, length in enumerate([10, 20, 30, 40, 50]):
        done = rollout(0, 1.0)
        done.turns[0].stop = length
        gate.observe_group(group_of(number, [done]))
    gate.end_step()
    assert gate.rule().at == Token(15)
    assert built(Arrol(at=7)).rule().at == Token(7)


def test_resume_is_exact() -> None:
    options = Arrol(cold_start=2)
    a, b = built(options, 1), built(options, 1)
    play(a, 4)
    import json

    b.load_state_dict(json.loads(json.dumps(a.state_dict(), allow_nan=False)))
    assert a.rule().at == b.rule().at
    assert [plain(v) for v in play(a, 3, seed=7)] == [plain(v) for v in play(b, 3, seed=7)]
    assert a.state_dict() == b.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": 0}, r"at: .*greater than 0 "),
        ({"share": 0.0}, r"share: .*greater than 0 "),
        ({"at": 8, "quantile": 0.9}, "quantile has no effect with at"),
        ({"at": 8, "share": 0.9}, "share has no effect with at"),
        ({"balance": "distinct", "target": 0.3}, "target has no effect with balance: distinct"),
        ({"balance": "distinct", "strength": 2.0}, "strength has no effect with balance: distinct"),
        ({"keep_rate": 0.0}, r"keep_rate: .*greater than 0 "),
        ({"head_width": 0}, r"head_width: .*greater than 0 "),
        ({"head_lr": 0.0}, r"head_lr: .*greater than 0 "),
        ({"bins": 1}, r"bins: .*greater than or equal to 2 "),
        ({"cold_start": 0}, r"cold_start: .*greater than 0 "),
        ({"min_survivors": -1}, "min_survivors"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    from winnow.config.options import method
    from winnow.methods.gate import GATES

    with pytest.raises(ConfigError, match=message):
        method(GATES, {"name": "arrol", **options}, "gates")


def test_groups_of_0_1_and_all_survivors_and_early_ends_are_named_in_metrics() -> None:
    gate = built(Arrol(at=4, cold_start=1, min_survivors=0))
    play(gate, 1)
    gate._survival_B[:] = 0.5
    seen = {"none": 0, "one": 0, "all": 0}
    for number in range(60):
        verdicts = [ask(gate, view(500 + number, i, 3, np.ones(H))) for i in range(3)]
        kept = [v.keep for v in verdicts]
        seen["none"] += sum(kept) == 0
        seen["one"] += sum(kept) == 1
        seen["all"] += sum(kept) == 3
        members = [rollout(i, 1.0 if v.keep else None, verdict=v) for i, v in enumerate(verdicts)]
        gate.observe_group(group_of(500 + number, members))
    assert min(seen.values()) > 0
    found = gate.metrics()
    assert {name: found[f"gate/arrol/survivors/{name}"] for name in seen} == seen
    assert found["gate/arrol/ended_early"] == 0
    gate.observe_group(group_of(900, [rollout(0, 1.0)]))
    assert gate.metrics()["gate/arrol/ended_early"] == 1
    gate.head.weights.layers[3][:] = np.nan
    gate.observe_group(group_of(901, [rollout(0, 1.0, verdict=ask(gate, view(901, 0, 1, np.ones(H))))]))
    assert gate.metrics()["gate/arrol/ended_early"] == 1, "it was asked, though nothing could be said"


@pytest.mark.parametrize("alike", [True, False])
def test_metrics_say_whether_siblings_can_be_told_apart(alike: bool) -> None:
    gate, rng, size = built(Arrol(at=4, cold_start=20, min_survivors=0)), np.random.default_rng(0), 8
    for step in range(12):
        for number in range(step * 12, step * 12 + 12):
            hidden = np.repeat(rng.normal(size=(1, H)), size, 0) if alike else rng.normal(size=(size, H))
            right = rng.random(size) < 1 / (1 + np.exp(-3 * hidden[:, 0]))
            logp = 0.0 if alike else -2.0
            verdicts = [ask(gate, view(number, i, size, hidden[i], logp=logp)) for i in range(size)]
            h = hidden.astype(np.float32)
            members = [rollout(i, float(right[i]), hidden=h[i], verdict=v) for i, v in enumerate(verdicts)]
            gate.observe_group(group_of(number, members))
        found = gate.metrics()
        gate.end_step()
    assert found["gate/arrol/auroc"] > 0.7, "questions can be told apart"
    if alike:
        assert found["gate/arrol/auroc_within"] == 0.5
        assert found["gate/arrol/novelty"] == pytest.approx(1 / size)
    else:
        assert found["gate/arrol/auroc_within"] > 0.7
        assert found["gate/arrol/novelty"] == pytest.approx(1 / (1 + 7 * np.exp(-8.0)))


@pytest.mark.slow
def test_distinct_keeps_what_few_siblings_are_expected_to_say_and_holds_the_keep_rate() -> None:
    gate = built(Arrol(at=4, cold_start=1, min_survivors=0, keep_rate=0.4, balance="distinct"))
    rng, size = np.random.default_rng(0), 16

    def asked_about(number: int) -> list[tuple[float, Verdict]]:
        logps = -rng.exponential(0.8, size)
        found = [(p, ask(gate, view(number, i, size, np.ones(H), logp=p))) for i, p in enumerate(logps)]
        gate.observe_group(group_of(number, [rollout(i, None, verdict=v) for i, (_, v) in enumerate(found)]))
        return found

    for number in range(60):
        asked_about(number)
    gate.end_step()
    asked = [pair for number in range(100, 400) for pair in asked_about(number)]
    chances = np.array([v.probability if v.keep else 1 - v.probability for _, v in asked])
    novelty = np.array([1 / (1 + (size - 1) * np.exp(4 * np.float32(p))) for p, _ in asked])
    np.testing.assert_allclose(chances, np.clip(gate._factor * novelty, 0.05, 1), rtol=1e-5)
    assert np.mean(chances) == pytest.approx(0.4, abs=0.03)
    assert np.mean([v.keep for _, v in asked]) == pytest.approx(0.4, abs=0.03)


def test_the_factor_of_survival_gives_the_keep_rate() -> None:
    weights = np.random.default_rng(1).uniform(0.05, 1, 500)
    for keep_rate in (0.1, 0.5, 0.9, 1.0):
        factor = survival_factor(weights, keep_rate, 0.05)
        assert np.clip(factor * weights, 0.05, 1).mean() == pytest.approx(keep_rate, abs=1e-9)


def test_tokens_saved_are_those_sampled_after_the_decision_in_any_turn() -> None:
    member = rollout(0, 1.0)
    member.turns = [Turn("a", "b", 0, 2, "stop"), Turn("c", None, 4, 8, "eos")]
    member.action_mask[2:4] = False
    decided = [Decision("arrol", Token(n), Verdict(True), turn) for n, turn in ((1, 0), (2, 0), (3, 1), (4, 1))]
    assert [_sampled_after(member, d) for d in decided] == [5, 4, 1, 0]


def test_distinct_moves_its_token_where_nothing_says_what_is_right() -> None:
    """How long rollouts are is known without that."""
    undecided = GroupJudge(default_success(["style", "format"], None))
    gate = Arrol(balance="distinct", quantile=0.5, share=0.5).build(GateContext("arrol", 0, undecided))
    before = gate.rule().at
    for number in range(4):
        gate.observe_group(group_of(number, [rollout(i, float(i % 2)) for i in range(4)]))
    gate.end_step()
    assert (before, gate.rule().at) == (Token(FIRST_DETECTION_TOKEN), Token(4))
