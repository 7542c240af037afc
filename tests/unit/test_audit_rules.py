"""Audits of rules against simulated truth: unbiased, honest intervals, a controller that keeps its promise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest

from winnow.methods.advantage import ADVANTAGES
from winnow.methods.gate.audit import RuleAudit
from winnow.methods.gate.estimates import Sums, WeightedMean
from winnow.methods.intervals import student
from winnow.types import Prompt

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


def some(names: Iterable[str], *few: str) -> list[Any]:
    """All of them, most as slow tests."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


DIFFERENT = ("binary 1%, eps .05", "all worthless, eps .1", "skewed 50%, eps .1", "binary 20%, value rarely audited")


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
    for i in np.flatnonzero(overridden):
        sums.audit(float(p[i]), float(y[i]), float(tokens[i]))
    for probability, count in zip(*np.unique(p[~overridden], return_counts=True), strict=True):
        sums.remove(float(probability), int(count))
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


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("name", some(POPULATIONS, *DIFFERENT))
def test_intervals_hold_the_truth_and_are_of_use(name: str) -> None:
    table = coverage(name, 1000)
    for key, row in table.items():
        assert row["coverage"] >= 0.935, (key, row)
    assert table["precision"]["width"] <= 0.75
    assert table["signal_lost"]["width"] <= POPULATIONS[name][2]
    assert abs(table["precision"]["error"]) < 0.02
    assert abs(table["signal_lost"]["error"]) < 0.03


@pytest.mark.parametrize("name", some((n for n in POPULATIONS if "worthless" not in n), *DIFFERENT))
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
    assert audit.whole.precision()[1:] == (0.0, 1.0)
    assert audit.whole.signal_lost(audit.largest) == (0.0, 0.0, 0.0)
    assert audit.whole.tokens_saved() == (0.0, 0.0, 0.0)
    for _ in range(3):
        audit.removed(audit.probability)
    audit.kept(5.0)
    assert audit.whole.signal_lost(audit.largest)[1:] == (0.0, 1.0)
    assert audit.whole.tokens_saved()[1:] == (0.0, math.inf)
    metrics = audit.metrics()
    assert metrics["audit/rule/signal_lost_high"] == 1.0
    assert "audit/rule/precision" not in metrics
    assert "audit/rule/tokens_saved_high" not in metrics
    json.dumps(metrics, allow_nan=False)
    for _ in range(10):
        audit.audited(1.0, 0.0, 10.0)
    assert audit.whole.signal_lost(audit.largest)[1:] == (0.0, 1.0), "certain overrides tell nothing of removals"
    for _ in range(10):
        audit.audited(0.1, 0.0, 10.0)
    low, high = audit.whole.signal_lost(audit.largest)[1:]
    assert low == 0.0
    assert 0.05 < high < 1.0
    assert audit.whole.tokens_saved().low < 30.0 < audit.whole.tokens_saved().high, "equal audits are not certainty"


def overridden(audit: RuleAudit, *key: int) -> bool:
    """Whether the removal `key` is overridden now."""
    *before, last = key
    return bool(audit.overrides().draws(np.array([last]), *before)[0])


def test_overrides_depend_on_the_key_alone() -> None:
    audit = RuleAudit("greso", 0.3, seed=5)
    ordinals = np.arange(2000)
    whole = audit.overrides().draws(ordinals, 3)
    assert 0.25 < whole.mean() < 0.35
    np.testing.assert_array_equal(
        whole, np.concatenate([audit.overrides().draws(part, 3) for part in np.split(ordinals, 8)])
    )
    assert [overridden(audit, 3, i) for i in range(50)] == whole[:50].tolist()
    for other in (RuleAudit("greso", 0.3, seed=6), RuleAudit("gate", 0.3, seed=5)):
        assert (other.overrides().draws(ordinals, 3) != whole).any()
    assert (audit.overrides().draws(ordinals, 4) != whole).any()
    assert RuleAudit("greso", 1.0).overrides().draws(ordinals, 0).all()


# The controller, on a rule whose removals hold more or less of the signal as time goes by.


def controlled(value: Callable[[int], float], steps: int, max_signal_loss: float | None, seed: int) -> dict[str, Any]:
    """16 removals and 16 kept groups a step; a removal is of value with probability `value(step)`."""
    rng = np.random.default_rng(seed)
    audit = RuleAudit("rule", 0.05, max_signal_loss)
    lost = total = 0.0
    carried = []
    for step in range(steps):
        for drawn in audit.overrides().draws(np.arange(16), seed, step):
            signal = 8.0 * (rng.random() < value(step))
            total += signal
            if drawn:
                audit.audited(audit.probability, signal, 100.0)
            else:
                audit.removed(audit.probability)
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


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("name", some(DRIFTS, "harmless", "getting better", "in waves", "suddenly worse"))
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


def test_without_the_controller_the_loss_would_be_high() -> None:
    assert controlled(DRIFTS["getting worse"], 300, None, 0)["lost"] > 0.25


def test_a_resumed_audit_goes_on_exactly() -> None:
    first = controlled(DRIFTS["in waves"], 70, 0.1, 3)["audit"]
    second = RuleAudit("rule", 0.05, 0.1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for audit in (first, second):
        for i in range(20):
            audit.removed(audit.probability)
            audit.audited(audit.probability, 8.0 * (i % 3 == 0), 50.0 + i)
            audit.kept(4.0)
            audit.end_step()
    assert second.state_dict() == first.state_dict()
    assert second.metrics() == first.metrics()


@pytest.mark.parametrize("every", [None, 10], ids=["idle", "removals now and then"])
def test_audits_of_long_ago_are_forgotten_as_if_there_had_been_none(every: int | None) -> None:
    """Their weights fade to where squares are 0."""
    audit = RuleAudit("rule", 0.001, 0.1)
    for _ in range(5):
        audit.removed(0.5)
        audit.audited(0.5, 0.0, 3.0)
    early = tuple(audit.recent.signal.bounded(1.0))
    for step in range(20_000):
        audit.kept(1.0)
        if every and step % every == 0:
            audit.removed(0.001)
        audit.end_step()
        assert audit.probability >= 0.001
        if step == 2_000 and not every:
            assert tuple(audit.recent.signal.bounded(1.0)) == pytest.approx(early)
        if step % 500 == 0:
            again = RuleAudit("rule", 0.001, 0.1)
            again.load_state_dict(json.loads(json.dumps(audit.state_dict())))
    assert audit.recent.signal.w == audit.recent.signal.a == 0
    assert audit.probability == 0.9, "nothing is known of what it removes"
    audit.audited(0.9, 0.0, 3.0)
    assert audit.recent.signal.bounded(1.0).value == 0


def test_a_rare_removal_after_frequent_audits_has_bounds_that_are_numbers() -> None:
    audit = RuleAudit("rule", 1e-4, 0.1)
    for _ in range(4):
        audit.audited(0.3, 0.0, 100.0)
    audit.removed(1e-4)
    assert math.isfinite(audit.metrics()["audit/rule/tokens_saved_high"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("probability",), 0.0),
        (("probability",), 1.5),
        (("largest",), -1.0),
        (("whole", "removed"), -1),
        (("whole", "lost"), [1.0]),
        (("recent", "lost", "w"), float("nan")),
        (("recent", "signal", "w"), None),
    ],
)
def test_an_account_that_no_audit_has_is_refused(path: tuple[str, ...], value: Any) -> None:
    audit = RuleAudit("rule", 0.05, 0.1)
    audit.audited(0.5, 1.0, 3.0)
    state = json.loads(json.dumps(audit.state_dict()))
    RuleAudit("rule", 0.05, 0.1).load_state_dict(state)
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises((TypeError, ValueError)):
        RuleAudit("rule", 0.05, 0.1).load_state_dict(state)


def test_an_account_of_huge_rewards_is_taken() -> None:
    audit = RuleAudit("rule", 0.05, 0.1)
    audit.audited(0.05, 1e60, 1e6)
    again = RuleAudit("rule", 0.05, 0.1)
    again.load_state_dict(json.loads(json.dumps(audit.state_dict())))
    assert again.state_dict() == audit.state_dict()
