"""Audits of rules against simulated truth: unbiased, honest intervals, a controller that keeps its promise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.advantage import ADVANTAGES
from winnow.gate import Gate
from winnow.gate.audit import AuditedGate, RuleAudit, squared_advantages
from winnow.gate.estimates import Sums, WeightedMean, student
from winnow.select import SELECTORS
from winnow.select.audit import AuditedSelector
from winnow.select.stream import StreamSelector
from winnow.types import EnvStep, Fate, Group, GroupView, Prompt, Token, Verdict, Visit

from .test_batch import make_group
from .test_rollout import SHORT_TURNS, EchoEnv, ToyTask, run

PROMPTS = [Prompt(f"p{i}", i, text=str(i)) for i in range(40)]
GRPO = ADVANTAGES["grpo"]()
Rng = np.random.Generator


# Populations of removals: signals [N] by which they would have taught, and probabilities [N] to be overridden.


def binary(share: float, n: int = 400) -> Callable[[Rng], np.ndarray]:
    return lambda rng: 8.0 * (rng.random(n) < share)


def skewed(share: float, n: int = 400) -> Callable[[Rng], np.ndarray]:
    return lambda rng: np.where(rng.random(n) < share, np.minimum(np.exp(rng.normal(0, 1, n)), 8.0), 0.0)


def continuous(n: int = 400) -> Callable[[Rng], np.ndarray]:
    return lambda rng: 8 * rng.beta(0.5, 3.0, n)


def late(rng: Rng) -> np.ndarray:
    """Worthless while audits are frequent, of some value later."""
    return np.concatenate([np.zeros(200), 8.0 * (rng.random(200) < 0.05)])


def equal(epsilon: float) -> Callable[[np.ndarray, Rng], np.ndarray]:
    return lambda y, rng: np.full(len(y), epsilon)


def mixed(y: np.ndarray, rng: Rng) -> np.ndarray:
    return rng.choice([0.05, 0.2, 0.5], len(y))


def shy(y: np.ndarray, rng: Rng) -> np.ndarray:
    """What is of value is audited more rarely."""
    return np.where((y > 0) & (rng.random(len(y)) < 0.7), 0.05, 0.3)


def keen(y: np.ndarray, rng: Rng) -> np.ndarray:
    return np.where((y > 0) & (rng.random(len(y)) < 0.7), 0.5, 0.05)


def certain_first(y: np.ndarray, rng: Rng) -> np.ndarray:
    return np.where(np.arange(len(y)) < len(y) // 2, 1.0, 0.05)


POPULATIONS: dict[str, tuple[Any, Any, float]] = {
    # (signals, probabilities, widest mean interval of signal_lost that is still of use)
    "binary 30%, eps .1": (binary(0.3), equal(0.1), 0.3),
    "binary 5%, eps .1": (binary(0.05), equal(0.1), 0.4),
    "binary 1%, eps .05": (binary(0.01), equal(0.05), 0.5),
    "binary 90%, eps .05": (binary(0.9), equal(0.05), 0.15),
    "binary 30% of 1500, eps .02": (binary(0.3, 1500), equal(0.02), 0.3),
    "binary 30% of 40, eps .1": (binary(0.3, 40), equal(0.1), 0.4),
    "all worthless, eps .1": (binary(0.0), equal(0.1), 0.3),
    "skewed 50%, eps .1": (skewed(0.5), equal(0.1), 0.3),
    "skewed 10%, eps .5": (skewed(0.1), equal(0.5), 0.1),
    "skewed 20% of 1500, eps .05": (skewed(0.2, 1500), equal(0.05), 0.4),
    "continuous, eps .05": (continuous(), equal(0.05), 0.5),
    "binary 20%, unequal": (binary(0.2), mixed, 0.45),
    "binary 20%, value rarely audited": (binary(0.2), shy, 0.5),
    "binary 20%, value often audited": (binary(0.2), keen, 0.45),
    "5% in the half rarely audited": (late, certain_first, 0.5),
}
KEPT_SIGNAL = 800.0


@cache
def simulate(name: str, seed: int) -> tuple[Sums, dict[str, float]]:
    """One repetition: what was booked, and the truth."""
    rng = np.random.default_rng(seed)
    signals, probabilities, _ = POPULATIONS[name]
    y = signals(rng)
    p = probabilities(y, rng)
    tokens = np.minimum(rng.geometric(0.01, len(y)), 512) + 20.0 * (y > 0)
    overridden = rng.random(len(y)) < p
    sums = Sums(kept_signal=KEPT_SIGNAL)
    for i, drawn in enumerate(overridden.tolist()):
        if drawn:
            sums.audit(float(p[i]), float(y[i]), float(tokens[i]))
        else:
            sums.remove(float(p[i]), 1)
    lost = float(y[~overridden].sum())
    truth = {
        "precision": float(np.mean(y == 0)),
        "signal_lost": lost / (float(y.sum()) + KEPT_SIGNAL),
        "tokens_saved": float(tokens[~overridden].sum()),
        "lost": lost,
    }
    return sums, truth


def coverage(name: str, repetitions: int) -> dict[str, dict[str, float]]:
    """By quantity: share of intervals that hold the truth, mean error, mean width (tokens: relative)."""
    found: dict[str, list[tuple[float, float, float]]] = {"precision": [], "signal_lost": [], "tokens_saved": []}
    for seed in range(repetitions):
        sums, truth = simulate(name, seed)
        estimates = (sums.precision(), sums.signal_lost(8.0), sums.tokens_saved())
        for key, (value, low, high) in zip(found, estimates, strict=True):
            unit = truth[key] if key == "tokens_saved" else 1.0
            covered = low - 1e-9 <= truth[key] <= high + 1e-9
            assert math.isnan(value) or low <= value <= high
            found[key].append((float(covered), (value - truth[key]) / unit, min(high - low, 1e9) / unit))
    table = {}
    for key, rows in found.items():
        covered, error, width = np.array(rows).T
        table[key] = {"coverage": covered.mean(), "error": np.nanmean(error), "width": np.median(width)}
    return table


@pytest.mark.parametrize("name", list(POPULATIONS))
def test_intervals_hold_the_truth_and_are_of_use(name: str) -> None:
    table = coverage(name, 1000)
    for key, row in table.items():
        assert row["coverage"] >= 0.935, (key, row)
    assert table["precision"]["width"] <= 0.75
    assert table["signal_lost"]["width"] <= POPULATIONS[name][2]
    assert abs(table["precision"]["error"]) < 0.02
    assert abs(table["signal_lost"]["error"]) < 0.03


@pytest.mark.parametrize("name", [n for n in POPULATIONS if "worthless" not in n])
def test_the_weighted_sums_are_unbiased(name: str) -> None:
    """Horvitz-Thompson: the weighted audits are on average what they stand for, whatever the probabilities."""
    errors = []
    for seed in range(1000):
        sums, truth = simulate(name, seed)
        errors.append(
            (sums.lost.wy - truth["lost"], sums.lost.w - sums.removed, sums.tokens.wy - truth["tokens_saved"])
        )
    mean, sd = np.mean(errors, axis=0), np.std(errors, axis=0)
    assert np.all(np.abs(mean) < 4 * sd / math.sqrt(1000))


def test_equal_weights_are_wilsons_interval() -> None:
    for n, x in ((20, 0), (20, 3), (50, 25), (7, 7)):
        mean = WeightedMean()
        for i in range(n):
            mean.add(4.0, 4.0, float(i < x))
        z, p = 1.959963984540054, x / n
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        high = (p + z * z / (2 * n) + half) / (1 + z * z / n)
        assert mean.bounded(1.0).high == pytest.approx(min(1.0, high), abs=1e-12)
        assert mean.bounded(1.0).low <= (p + z * z / (2 * n) - half) / (1 + z * z / n) + 1e-12
        assert mean.bounded(2.0).high >= mean.bounded(1.0).high


@pytest.mark.parametrize(("v", "t"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042), (1000, 1.962)])
def test_student(v: float, t: float) -> None:
    assert student(v) == pytest.approx(t, rel=0.15 if v < 3 else 0.01) or v == 1


def test_nothing_is_claimed_before_there_is_evidence() -> None:
    audit = RuleAudit("rule", 0.1)
    assert audit.precision()[1:] == (0.0, 1.0)
    assert audit.signal_lost() == (0.0, 0.0, 0.0)
    assert audit.tokens_saved() == (0.0, 0.0, 0.0)
    audit.removed(3)
    audit.kept(5.0)
    assert audit.signal_lost()[1:] == (0.0, 1.0)
    assert audit.tokens_saved()[1:] == (0.0, math.inf)
    metrics = audit.metrics()
    assert metrics["audit/rule/signal_lost_high"] == 1.0
    assert "audit/rule/precision" not in metrics
    assert "audit/rule/tokens_saved_high" not in metrics
    json.dumps(metrics, allow_nan=False)
    for _ in range(10):
        audit.audited(1.0, 0.0, 10.0)
    assert audit.signal_lost()[1:] == (0.0, 1.0), "overrides that were certain tell nothing of what was removed"
    for _ in range(10):
        audit.audited(0.1, 0.0, 10.0)
    low, high = audit.signal_lost()[1:]
    assert low == 0.0
    assert 0.05 < high < 1.0
    assert audit.tokens_saved().low < 30.0 < audit.tokens_saved().high, "equal audits are not certainty"


@pytest.mark.parametrize(
    "bad", [{"epsilon": 0.0}, {"epsilon": 1.5}, {"max_signal_loss": 0.0}, {"max_signal_loss": 1.0}]
)
def test_bad_options_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RuleAudit("rule", **({"epsilon": 0.1} | bad))


def test_overrides_depend_on_the_key_alone() -> None:
    audit = RuleAudit("greso", 0.3, seed=5)
    ordinals = np.arange(2000)
    whole = audit.overrides(ordinals, 3)
    assert 0.25 < whole.mean() < 0.35
    np.testing.assert_array_equal(whole, np.concatenate([audit.overrides(part, 3) for part in np.split(ordinals, 8)]))
    assert [audit.override(3, i)[0] for i in range(50)] == whole[:50].tolist()
    for other in (RuleAudit("greso", 0.3, seed=6), RuleAudit("gate", 0.3, seed=5)):
        assert (other.overrides(ordinals, 3) != whole).any()
    assert (audit.overrides(ordinals, 4) != whole).any()
    assert RuleAudit("greso", 1.0).overrides(ordinals, 0).all()


# The controller, on a rule whose removals hold more or less of the signal as time goes by.


def controlled(value: Callable[[int], float], steps: int, max_signal_loss: float | None, seed: int) -> dict[str, Any]:
    """16 removals and 16 kept groups a step; a removal is of value with probability `value(step)`."""
    rng = np.random.default_rng(seed)
    audit = RuleAudit("rule", 0.05, max_signal_loss)
    lost = total = 0.0
    carried = []
    for step in range(steps):
        for i in range(16):
            signal = 8.0 * (rng.random() < value(step))
            total += signal
            overridden, p = audit.override(seed, step, i)
            if overridden:
                audit.audited(p, signal, 100.0)
            else:
                audit.removed()
                lost += signal
        for signal in 8.0 * (rng.random(16) < 0.5):
            audit.kept(signal)
            total += signal
        carried.append(1 - audit.probability)
        audit.end_step()
    return {"lost": lost / total, "carried": carried, "audit": audit}


DRIFTS: dict[str, Callable[[int], float]] = {
    "harmless": lambda step: 0.0,
    "nearly harmless": lambda step: 0.02,
    "as good as what is kept": lambda step: 0.5,
    "getting worse": lambda step: 0.5 * step / 300,
    "getting better": lambda step: 0.5 * (1 - step / 300),
    "in waves": lambda step: 0.25 * (1 - math.cos(step / 30)),
    "suddenly worse": lambda step: 0.0 if step < 150 else 0.5,
}


@pytest.mark.parametrize("name", list(DRIFTS))
def test_the_controller_keeps_the_true_loss_below_its_limit(name: str) -> None:
    losses = []
    for seed in range(5):
        found = controlled(DRIFTS[name], 300, 0.1, seed)
        assert found["carried"][0] == 0.0, "nothing is removed until there is evidence"
        losses.append(found["lost"])
        if "harmless" in name:
            assert np.mean(found["carried"][50:]) > 0.6, "it does remove what may be removed"
        if name == "getting better":
            assert np.mean(found["carried"][:50]) < 0.4 < np.mean(found["carried"][-20:])
    assert np.mean(losses) <= 0.1
    assert max(losses) <= 0.11, "which removals the draws hit is luck"
    assert controlled(DRIFTS["getting worse"], 300, None, 0)["lost"] > 0.25, "without it the loss would be high"


def test_a_resumed_audit_goes_on_exactly() -> None:
    first = controlled(DRIFTS["in waves"], 70, 0.1, 3)["audit"]
    second = RuleAudit("rule", 0.05, 0.1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for audit in (first, second):
        for i in range(20):
            audit.removed()
            audit.audited(audit.override(9, i)[1], 8.0 * (i % 3 == 0), 50.0 + i)
            audit.kept(4.0)
            audit.end_step()
    assert second.state_dict() == first.state_dict()
    assert second.metrics() == first.metrics()


# Selectors and gates under audit.


def build(name: str, prompts: list[Prompt], *, seed: int = 3, **audit: Any) -> AuditedSelector:
    selector: StreamSelector = SELECTORS[name]().build(prompts, seed=seed)
    return AuditedSelector(selector, RuleAudit(name, **({"epsilon": 0.3} | audit), seed=seed), GRPO)


def answered(visit: Visit, teaches: bool) -> Group:
    return replace_visit(make_group(visit.number, [1.0, 0.0] if teaches else [0.0, 0.0]), visit)


def replace_visit(group: Group, visit: Visit) -> Group:
    return Group(visit, group.rollouts, group.verdict)


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
            selector.observe(answered(v, v.prompt.ordinal % 4 == 0))
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
    assert metrics["epoch"] == selector.selector.metrics()["epoch"]


def test_probabilities_are_those_of_survival() -> None:
    selector = build("greso", PROMPTS, epsilon=0.25)
    selector.selector.z_N[:], selector.selector.kind_N[:] = 2, 1  # kept with 0.5 ** 2, so with 0.25 + 0.75 * 0.25
    for v in selector.select(30):
        assert v.verdict.probability == pytest.approx(0.4375 if v.verdict.keep else 0.5625)
    deterministic = build("backoff", PROMPTS, epsilon=0.25)
    deterministic.selector.z_N[:20] = 9
    found = {(v.verdict.keep, v.verdict.reason != ""): v.verdict.probability for v in deterministic.select(25)}
    assert found == {(True, False): 1.0, (True, True): 0.25, (False, True): 0.75}


@pytest.mark.parametrize("k", [0, 1, 7, 20])
def test_an_audited_selector_resumes_exactly(k: int) -> None:
    def go_on(selector: AuditedSelector, steps: int) -> list[Visit]:
        visits = []
        for _ in range(steps):
            visits += selector.select(6)
            for v in visits[-6:]:
                if v.verdict.keep:
                    selector.observe(answered(v, v.prompt.ordinal % 3 == 0))
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
        selector.selector.z_N[::2] = 60
        return [v for n in batches for v in selector.select(n)]

    assert visits([30]) == visits([1] * 30) == visits([7, 20, 3])


def test_a_long_history_is_looked_at_at_once() -> None:
    import time

    prompts = [Prompt(str(i), i, text="") for i in range(1_000_000)]
    selector = build("backoff", prompts, epsilon=0.02)
    selector.selector.z_N[:] = np.where(np.arange(1_000_000) % 10, 50_000, 0)
    selector.select(64)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        assert sum(v.verdict.keep for v in selector.select(384)) == 384
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05


def test_failures_are_no_evidence_and_other_rules_stops_have_no_signal() -> None:
    failed = make_group(0, [1.0, None, None])
    assert squared_advantages(failed, GRPO) is None
    pruned = make_group(0, [1.0, None, None])
    for rollout in pruned.rollouts[1:]:
        rollout.fate = Fate.PRUNED
    assert squared_advantages(pruned, GRPO).tolist() == [0.0, 0.0, 0.0]  # type: ignore[union-attr]
    mixed = squared_advantages(make_group(0, [1.0, 0.0, None]), GRPO)
    np.testing.assert_allclose(mixed, [1.0, 1.0, 0.0], atol=1e-5)  # type: ignore[arg-type]
    greedy = make_group(0, [1.0, 0.0])
    assert squared_advantages(greedy, ADVANTAGES["remax"]()) is None, "the greedy baseline failed"
    selector = build("backoff", PROMPTS, epsilon=1.0)
    selector.selector.z_N[:] = 9
    for v in selector.select(4):
        selector.observe(replace_visit(make_group(v.number, [1.0, None]), v))
    assert selector.metrics()["audit/backoff/audited"] == 0


@pytest.fixture(scope="module")
def policy(tiny_model: Any) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)


class Stops(Gate):
    """Stops odd siblings at token 3, each turn anew, or whole groups at step 2."""

    needs = frozenset()

    def __init__(self, at: Token | EnvStep, probability: float = 1.0) -> None:
        self.at, self.probability = at, probability
        self.observed: list[int] = []
        self.asked: list[tuple[int, int | None]] = []

    def decide(self, view: GroupView) -> Verdict:
        self.asked.append((view.visit.number, view.sibling))
        return Verdict(view.sibling is not None and view.sibling % 2 == 0, "stopped", self.probability)

    def observe(self, group: Group) -> None:
        self.observed.append(group.visit.number)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state == {"inner": 1}


def gated(policy: Any, task: ToyTask, gate: Gate, epsilon: float, **options: Any) -> tuple[AuditedGate, list[Group]]:
    audited = AuditedGate(gate, RuleAudit("stops", epsilon), GRPO)
    return audited, run(policy, task, gates=[audited], **options)


def test_an_overridden_sibling_runs_on_as_if_there_were_no_gate(policy: Any) -> None:
    free = run(policy, ToyTask())
    for epsilon in (1.0, 0.5):
        gate, groups = gated(policy, ToyTask(), Stops(Token(3)), epsilon)
        inner = gate.gate
        stopped = [k for k in inner.asked if k[1] % 2]  # type: ignore[attr-defined]
        audited, tokens = 0, 0.0
        for group, undisturbed in zip(groups, free, strict=True):
            squares = squared_advantages(group, GRPO)
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
        signal = [squared_advantages(g, GRPO) for g in groups]
        assert whole.audited_signal + whole.kept_signal == pytest.approx(sum(float(s.sum()) for s in signal))  # type: ignore[union-attr]
        assert inner.observed == [0, 1, 2]  # type: ignore[attr-defined]
        assert not gate._overridden
        assert not gate._chance


def test_a_random_gate_under_audit_keeps_its_survival_probabilities(policy: Any) -> None:
    """Kept or overridden: p + (1 - p) epsilon; and once per sibling, however many turns the gate is asked at."""
    gate, groups = gated(policy, ToyTask(), Stops(Token(3), probability=0.6), 0.5)
    found = set()
    for group in groups:
        for r in group.rollouts:
            if (group.visit.number, r.sibling) in gate.gate.asked:  # type: ignore[attr-defined]
                p = 0.6 if r.sibling % 2 == 0 else 0.4
                expected = p + (1 - p) * 0.5
                found.add(r.fate)
                assert r.survival_p == pytest.approx(1 - expected if r.fate == Fate.PRUNED else expected)
    assert found == {None, Fate.PRUNED}
    task = ToyTask(make=lambda _: EchoEnv(4))
    gate, groups = gated(policy, task, Stops(Token(2), probability=0.6), 0.5, max_tokens=300)
    asked = gate.gate.asked  # type: ignore[attr-defined]
    assert max(asked.count(k) for k in asked) > 1
    survivors = 0
    for group in groups:
        for r in group.rollouts:
            if r.fate is None:
                p = (0.6 if r.sibling % 2 == 0 else 0.4) ** asked.count((group.visit.number, r.sibling))
                assert r.survival_p == pytest.approx(p + (1 - p) * 0.5)
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
    again = AuditedGate(Stops(EnvStep(2)), RuleAudit("stops", epsilon), GRPO)
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

    audited = AuditedGate(Stops(Token(1)), RuleAudit("stops", 1.0), GRPO)
    run(policy, ToyTask(), gates=[audited, StopsAll(Token(3))])
    assert audited.audit.whole.audited > 0
    assert audited.audit.precision().value > 0.5
