"""Warnings of a collapse: not too early, not twice, and not for what is no collapse."""

from __future__ import annotations

import random

import pytest

from winnow.record.collapse import PATIENCE, EssWatch, low_ess, reward_collapse


def rows_of(name: str, values: list[float | None]) -> list[dict[str, float]]:
    return [{"step": float(i)} | ({} if v is None else {name: v}) for i, v in enumerate(values, 1)]


def test_a_spell_is_patient_and_steps_without_an_update_do_not_end_it() -> None:
    ratios: list[float | None] = [0.9, *[0.1] * (PATIENCE - 1), 0.9, 0.2, None, *[0.29] * PATIENCE, 0.3, 0.1]
    watch = EssWatch()
    fired = [row["step"] for row in rows_of("ess_ratio", ratios) if watch.observe(row)]
    start = PATIENCE + 2
    assert fired == [start + PATIENCE]
    found = low_ess(rows_of("ess_ratio", ratios))
    assert found is not None
    assert (found.first["step"], found.length) == (start, PATIENCE + 1)
    assert f"for {PATIENCE + 1} updates, from step {start}: updates are dominated" in found.message
    assert low_ess(rows_of("ess_ratio", [0.1] * (PATIENCE - 1))) is None
    assert low_ess(rows_of("ess_ratio/with_gradient", [0.1] * PATIENCE)) is not None, "where no other is known"
    still = low_ess(rows_of("ess_ratio", [0.1] * 40))
    assert still is not None
    assert still.length == 40


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
