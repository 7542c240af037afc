"""Warnings of a collapse: not too early, not twice, and not for what is no collapse."""

from __future__ import annotations

import random

import pytest

from winnow.config import validate
from winnow.record.collapse import ENTROPY, PATIENCE, ess_message, low_ess, reward_collapse
from winnow.record.watchdogs import Watchdogs


def rows_of(name: str, values: list[float | None]) -> list[dict[str, float]]:
    return [{"step": float(i)} | ({} if v is None else {name: v}) for i, v in enumerate(values, 1)]


def test_a_spell_is_patient_and_steps_without_an_update_do_not_end_it() -> None:
    ratios: list[float | None] = [0.9, *[0.1] * (PATIENCE - 1), 0.9, 0.2, None, *[0.29] * PATIENCE, 0.3, 0.1]
    start = PATIENCE + 2
    found = low_ess(rows_of("ess_ratio", ratios))
    assert (found[0]["step"], len(found)) == (start, PATIENCE + 1)
    assert f"for {PATIENCE + 1} updates, from step {start}: updates are dominated" in ess_message(found)
    assert low_ess(rows_of("ess_ratio", [0.1] * (PATIENCE - 1))) == []
    assert low_ess(rows_of("ess_ratio/with_gradient", [0.1] * PATIENCE)), "where no other is known"
    assert len(low_ess(rows_of("ess_ratio", [0.1] * 40))) == 40


def test_a_spell_is_reported_once_when_it_is_long_enough() -> None:
    ratios: list[float | None] = [0.9, *[0.1] * (PATIENCE - 1), 0.9, 0.2, None, *[0.29] * PATIENCE, *[0.1] * 20]
    watchdogs = Watchdogs(validate({"model": "m", "env": "countdown"}))
    said = {row["step"]: [*watchdogs.observe(row)] for row in rows_of("ess_ratio", ratios)}
    fired = {step: message for step, message in said.items() if message}
    assert list(fired) == [2 * PATIENCE + 2]
    assert f"for {PATIENCE} updates, from step {PATIENCE + 2}" in fired[2 * PATIENCE + 2][0]


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.5] * 50 + [0.1] * 50, 54.0),
        ([0.5] * 50 + [0.1] * 30 + [0.5] * 20, None),
        ([0.5] * 50 + [0.1] * 3, None),
        ([0.5] * 50 + [0.3] * 50, None),
        ([0.0] * 100, None),
        ([-0.5] * 50 + [-3.0] * 50, None),
        ([0.5, 0.1], None),
        ([], None),
    ],
)
def test_a_fall_of_the_reward(values: list[float | None], step: float | None) -> None:
    found = reward_collapse(rows_of("reward", values))
    assert (found and found["step"]) == step


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_no_fall(seed: int) -> None:
    draw = random.Random(seed)
    values: list[float | None] = [0.05 + 0.2 * i / 400 + draw.gauss(0, 0.02) for i in range(400)]
    assert reward_collapse(rows_of("reward", values)) is None


@pytest.mark.parametrize(
    ("values", "easy", "step"),
    [
        ([2.0, 1.0, *[0.19] * 9], 0.0, 2 + PATIENCE),
        ([2.0, *[0.19] * (PATIENCE - 1), 0.3, *[0.1] * 9], 0.4, 1 + 2 * PATIENCE),
        ([2.0, *[0.19] * 9], 0.6, None),  # it solves the task
        ([2.0, *[0.21] * 9], 0.0, None),
        ([0.05] * 9, 0.0, None),  # it was so from the start
        ([0.0] * 9, 0.0, None),
    ],
)
def test_a_fall_of_the_entropy(values: list[float | None], easy: float, step: int | None) -> None:
    watchdogs = Watchdogs(validate({"model": "m", "env": "countdown"}))
    rows = [row | {"frac_zero_easy": easy} for row in rows_of(ENTROPY, values)]
    fired = {row["step"]: message for row in rows for message in watchdogs.observe(row)}
    assert list(fired) == ([] if step is None else [step])
    assert all("nearly deterministic: the entropy is 0.1" in message for message in fired.values())


def test_a_resumed_run_is_compared_with_its_first_step() -> None:
    watchdogs = Watchdogs(validate({"model": "m", "env": "countdown"}))
    watchdogs.recall({ENTROPY: 2.0})
    assert sum(len([*watchdogs.observe(row)]) for row in rows_of(ENTROPY, [0.1] * 9)) == 1
