"""`balance: within` as an option of ARRoL's gate: keep rate, steering by prompt, memory, and resume."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from winnow.config import ConfigError, method
from winnow.methods.gate import GATES, within_table
from winnow.methods.gate.arrol.gate import Arrol, ArrolGate
from winnow.methods.gate.calibration import BinnedPosterior
from winnow.methods.gate.within_table import DECAY, PRIOR, PromptOutcomes
from winnow.types import Group, GroupView, Prompt, Verdict, Visit

from ..builders.arrol import H, built, rollout, view
from ..gates import plain

SIZE, RATES = 16, np.random.default_rng(0).beta(0.6, 1.0, 48)
"""Pass rates of prompts."""


def within(**options: Any) -> ArrolGate:
    return built(Arrol(at=4, cold_start=2, quality="logprob", balance="within", **{"min_survivors": 0} | options), 3)


def asked(number: int, ordinal: int, size: int = SIZE) -> tuple[list[GroupView], np.ndarray]:
    """Views of a group, and who is right; the log-probability tells something about that."""
    rng = np.random.default_rng([number, ordinal])
    right = rng.random(size) < RATES[ordinal]
    logps = -np.exp(rng.normal(0.4, 1, size) - 1.5 * right)
    visit = Visit(number, number // len(RATES), Prompt(f"p{ordinal}", ordinal, text="x"))
    views = [view(number, i, size, np.ones(H), logp=logps[i]) for i in range(size)]
    return [replace(v, visit=visit) for v in views], right


def play(gate: ArrolGate, first: int, groups: int, by_step: int = 12) -> list[tuple[int, np.ndarray, list[Verdict]]]:
    """Visits in the order of prompts: (prompt, right, verdicts)."""
    found = []
    for start in range(first, first + groups, by_step):
        rule = gate.rule()
        for number in range(start, start + by_step):
            views, right = asked(number, number % len(RATES))
            verdicts = rule.decide(views)
            members = [
                rollout(i, float(right[i]) if v.keep else None, v.probability if v.keep else 1.0, verdict=v)
                for i, v in enumerate(verdicts)
            ]
            gate.observe(Group(views[0].visit, members))
            found.append((number % len(RATES), right, verdicts))
        gate.end_step()
    return found


def chance(verdict: Verdict) -> float:
    return verdict.probability if verdict.keep else 1 - verdict.probability


@pytest.mark.parametrize("keep_rate", [0.3, 0.5, 0.8])
def test_the_keep_rate_is_kept(keep_rate: float) -> None:
    gate = within(keep_rate=keep_rate)
    play(gate, 0, 48)
    later = play(gate, 48, 192)
    assert np.mean([chance(v) for *_, vs in later for v in vs]) == pytest.approx(keep_rate, abs=0.03)
    assert np.mean([v.keep for *_, vs in later for v in vs]) == pytest.approx(keep_rate, abs=0.04)


def test_it_steers_from_the_side_of_the_prompt_and_groups_are_worth_more() -> None:
    """Where few are right, right ones survive more often than wrong ones; where many are, less often."""
    gate = within()
    play(gate, 0, 96)
    hard, easy, signal = [], [], {"within": 0.0, "random": 0.0}
    rng = np.random.default_rng(5)
    for ordinal, right, verdicts in play(gate, 96, 288):
        chances = np.array([chance(v) for v in verdicts])
        if 0 < right.sum() < SIZE:
            gap = chances[right].mean() - chances[~right].mean()
            (hard if RATES[ordinal] < 0.3 else easy if RATES[ordinal] > 0.7 else []).append(gap)
        kept = np.array([v.keep for v in verdicts])
        for name, who in (("within", kept), ("random", rng.random(SIZE) < 0.5)):
            signal[name] += float(right[who].var() * who.sum()) if who.any() else 0.0
    assert np.mean(hard) > 0.05
    assert np.mean(easy) < -0.05
    assert signal["within"] > 1.2 * signal["random"]


def test_decisions_do_not_depend_on_who_else_is_asked() -> None:
    gate = within()
    play(gate, 0, 96)
    views = [v for number in range(900, 906) for v in asked(number, number % len(RATES))[0]]
    many = [plain(v) for v in gate.rule().decide(views)]
    assert [plain(v) for v in gate.rule().decide(views[::-1])][::-1] == many
    assert [plain(gate.rule().decide([v])[0]) for v in views] == many
    assert {keep for keep, *_ in many} == {True, False}


def test_resume_is_exact() -> None:
    a, b = within(), within()
    play(a, 0, 96)
    b.load_state_dict(json.loads(json.dumps(a.state_dict(), allow_nan=False)))
    told = [[plain(v) for v in vs] for *_, vs in play(a, 96, 36)]
    assert told == [[plain(v) for v in vs] for *_, vs in play(b, 96, 36)]
    assert a.state_dict() == b.state_dict()


def test_outcomes_count_what_they_are_worth_decay_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(within_table, "PROMPTS", 64)
    memory, posterior = PromptOutcomes(0.5, 0.05, 64), BinnedPosterior()
    memory.asked(7, 3, 8, known=False)
    memory.visited(7, [(True, 1.0), (False, 1.0), (False, 1.0)])
    memory.visited(8, [(True, 20.0), (False, 1.0)])
    memory.end_step(posterior)
    assert memory.table is not None
    assert memory.table.beta_of(99) is None
    assert memory.table.prior == (PRIOR / 2, PRIOR / 2), "no label was seen"
    assert memory.table.beta_of(7) == pytest.approx((PRIOR / 2 + DECAY, PRIOR / 2 + 2 * DECAY))
    worth = 21**2 / 401
    wins, losses = DECAY * worth * 20 / 21, DECAY * worth / 21
    assert memory.table.beta_of(8) == pytest.approx((PRIOR / 2 + wins, PRIOR / 2 + losses))
    for ordinal in range(64 + 10):
        memory.visited(ordinal, [(True, 1.0)])
    memory.end_step(posterior)
    assert len(memory.table.ordinals_N) == 64
    assert memory.table.ordinals_N[0] == 8 + 2, "those visited last are remembered"
    for _ in range(400):
        memory.end_step(posterior)
    assert len(memory.table.ordinals_N) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.3}, "target has no effect with balance: within"),
        ({"strength": 2.0}, "strength has no effect with balance: within"),
        ({"p_min": 0.0}, "within needs p_min above 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method(GATES, {"name": "arrol", "balance": "within", **options}, "gates")
