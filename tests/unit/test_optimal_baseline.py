"""OPOB against what it is meant to do: no other baseline gives a smaller variance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.advantage import optimal_baseline


def variance(rewards: np.ndarray, w: np.ndarray, gradients: np.ndarray, b: float) -> float:
    """Empirical second moment of w (r - b) g; its mean does not matter for the minimum where E[w g] = 0."""
    terms = (w * (rewards - b))[:, None] * gradients
    return float((terms**2).sum(1).mean())


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 12))
def test_no_baseline_on_a_grid_varies_less(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, log_w = rng.random(size), rng.normal(size=size)
    gradients = rng.normal(size=(size, 5)) * rng.exponential(size=(size, 1))
    b = optimal_baseline(rewards, log_w, (gradients**2).sum(1))
    least = variance(rewards, np.exp(log_w), gradients, b)
    for other in np.linspace(-1, 2, 301):
        assert least <= variance(rewards, np.exp(log_w), gradients, other) + 1e-12


def test_groups_have_their_own() -> None:
    rng = np.random.default_rng(0)
    rewards, log_w, norms = rng.random(9), rng.normal(size=9), rng.random(9)
    group = np.array([5, 1, 5, 1, 1, 5, 2, 2, 1])
    found = optimal_baseline(rewards, log_w, norms, group)
    for name in (1, 2, 5):
        rows = group == name
        assert found[rows] == pytest.approx(optimal_baseline(rewards[rows], log_w[rows], norms[rows]))


def test_special_cases() -> None:
    rewards = np.array([1.0, 0.0, 0.0, np.nan])
    assert optimal_baseline(rewards, np.zeros(4), np.ones(4)) == pytest.approx(1 / 3)
    assert optimal_baseline(rewards, np.zeros(4), np.zeros(4)) == pytest.approx(1 / 3), "no gradient at all"
    assert optimal_baseline(rewards, [600.0, -600.0, 0.0, 1e300], np.ones(4)) == pytest.approx(1.0)
    assert optimal_baseline(rewards, [-np.inf, 0.0, 0.0, 0.0], np.ones(4)) == 0.0
    assert np.isnan(optimal_baseline(rewards, np.zeros(4), np.ones(4), [0, 0, 0, 1])[3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 0.0], [0.0], [1.0, 1.0]), r"must be \[B\]"),
        (([1.0, np.inf], [0.0, 0.0], [1.0, 1.0]), "rewards must be finite"),
        (([1.0, 0.0], [0.0, 0.0], [1.0, -1.0]), "not negative"),
        (([1.0, 0.0], [0.0, np.inf], [1.0, 1.0]), "below infinity"),
        (([1.0, 0.0], [0.0, np.nan], [1.0, 1.0]), "below infinity"),
        (([np.nan, np.nan], [0.0, 0.0], [1.0, 1.0]), "at least one reward"),
        (([1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0]), "group_B must be"),
    ],
)
def test_bad_input_is_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimal_baseline(*arguments)
