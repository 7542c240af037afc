"""Pruning within groups: rules against random ones, keep rates, and weights that undo it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from winnow.methods.gate.within import (
    RATES_P,
    ScoreModel,
    price_of,
    rate_weights,
    survival_within,
)


def signal(rewards: np.ndarray) -> float:
    return float(((rewards - rewards.mean()) ** 2).sum()) if len(rewards) else 0.0


def rules_of(size: float = 8, p_min: float = 0.05, sharp: float = 1.5, bins: int = 12) -> ScoreModel:
    """A score with some knowledge."""
    x_B = (np.arange(bins) + 0.5) / bins
    success_B, failure_B = np.exp(sharp * x_B), np.exp(-sharp * x_B)
    return ScoreModel(failure_B / failure_B.sum(), success_B / success_B.sum(), size, p_min)


def test_the_signal_of_a_rule_is_that_of_groups_pruned_by_it() -> None:
    """By simulation: success by the prompt's rate, score by success, survival by score."""
    rules, rng = rules_of(), np.random.default_rng(0)
    weight_P = rate_weights(2.0, 5.0)[0]
    signal_C, kept_C = (found[0] for found in rules.worth(weight_P[None]))
    for c in (30, 115, 200):
        p_N = rng.choice(RATES_P, 40_000, p=weight_P)
        right_NG = rng.random((40_000, 8)) < p_N[:, None]
        bins = [rng.choice(12, right_NG.shape, p=like_B) for like_B in (rules.failure_B, rules.success_B)]
        kept_NG = rng.random(right_NG.shape) < rules.survival_CB[c][np.where(right_NG, bins[1], bins[0])]
        m_N, k_N = kept_NG.sum(1), (right_NG & kept_NG).sum(1)
        found = (k_N - k_N**2 / np.maximum(m_N, 1)).mean()
        assert signal_C[c] == pytest.approx(found, abs=4 * found / 100)
        assert kept_C[c] == pytest.approx(kept_NG.mean(), abs=0.005)


@pytest.mark.parametrize("seed", range(4))
def test_a_rule_that_keeps_all_has_a_worth(seed: int) -> None:
    """Chances that add up to a rounding error more than 1, and groups of a fractional size: copies count once."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        failure_B, success_B = (x / x.sum() * (1 + 1e-15) for x in rng.random((2, 10)))
        signal_NC, kept_NC = ScoreModel(failure_B, success_B, 3.5, 0.05).worth(rate_weights(2, 3))
        assert np.isfinite(signal_NC).all()
        assert kept_NC.max() <= 1 + 1e-12


@pytest.mark.parametrize(("wins", "losses"), [(1.0, 9.0), (9.0, 1.0), (5.0, 5.0), (0.5, 0.5), (40.0, 60.0)])
def test_no_rule_at_the_same_keep_rate_leaves_more(wins: float, losses: float) -> None:
    """Random chances of survival for every bin, of any shape, at no more survivors."""
    rules, rng = rules_of(), np.random.default_rng(1)
    weight_NP = rate_weights([wins], [losses])
    signal_C, kept_C = (found[0] for found in rules.worth(weight_NP))
    for _ in range(400):
        shape_B = np.clip(rng.normal(rng.random(), rng.choice([0.1, 0.5, 2.0]), 12), rules.p_min, 1)
        other = ScoreModel(rules.failure_B, rules.success_B, rules.size, rules.p_min)
        other.__dict__["survival_CB"] = shape_B[None]
        [[worth]], [[kept]] = other.worth(weight_NP)
        assert worth <= signal_C[kept_C <= kept + 0.045].max() + 0.005  # levels are 0.041 apart


def test_it_steers_to_the_middle_from_the_side_of_the_prompt() -> None:
    rules = rules_of(p_min=0.05)
    weight_NP = rate_weights([2.0, 10.0, 18.0], [18.0, 10.0, 2.0])
    survival_NB = survival_within(rules, weight_NP, price_of(rules, weight_NP, 0.5))
    hard_B, even_B, easy_B = survival_NB
    assert hard_B[-1] > hard_B[0], "where few succeed, what scores well"
    assert easy_B[0] > easy_B[-1], "where few fail, what scores badly"
    np.testing.assert_allclose(hard_B, easy_B[::-1], atol=1e-9)
    assert abs(even_B[-1] - even_B[0]) < 0.11
    assert rules.survival_CB.min() == 0.05


def test_a_score_that_knows_nothing_gives_siblings_equal_chances_of_worth() -> None:
    rules = rules_of(sharp=0.0)
    signal_C, kept_C = (found[0] for found in rules.worth(rate_weights([2.0], [6.0])))
    for level in range(24):
        same = slice(11 * level, 11 * level + 11)
        np.testing.assert_allclose(signal_C[same], signal_C[same][0], atol=1e-9)
        np.testing.assert_allclose(kept_C[same], kept_C[same][0], atol=1e-9)


@pytest.mark.parametrize("keep_rate", [0.05, 0.2, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("prompts", [1, 40])
def test_the_keep_rate_comes_out(keep_rate: float, prompts: int) -> None:
    rules, rng = rules_of(), np.random.default_rng(0)
    rate_N = rng.beta(0.7, 1.3, prompts)
    weight_NP = rate_weights(0.5 + 8 * rate_N, 0.5 + 8 * (1 - rate_N))
    survival_NB = survival_within(rules, weight_NP, price_of(rules, weight_NP, keep_rate))
    p_N = weight_NP @ RATES_P
    kept_N = (survival_NB * (p_N[:, None] * rules.success_B + (1 - p_N)[:, None] * rules.failure_B)).sum(1)
    assert kept_N.mean() == pytest.approx(keep_rate, abs=1e-6)
    assert (survival_NB >= rules.p_min - 1e-12).all()
    assert (survival_NB <= 1 + 1e-12).all()


def test_weights_of_survivors_undo_it() -> None:
    """Horvitz and Thompson, by enumeration of who survives: the sum over survivors of x / p is that over all."""
    rules = rules_of()
    weight_NP = rate_weights([2.0], [6.0])
    [survival_B] = survival_within(rules, weight_NP, price_of(rules, weight_NP, 0.5))
    bin_G, x_G = np.array([0, 3, 7, 11]), np.array([0.3, -2.0, 1.5, 0.7])
    p_G, total = survival_B[bin_G], 0.0
    for kept in product((0, 1), repeat=4):
        kept_G = np.array(kept, float)
        total += float(np.prod(np.where(kept_G == 1, p_G, 1 - p_G)) * (kept_G * x_G / p_G).sum())
    assert total == pytest.approx(x_G.sum())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("rho", "error", "delta"), [(0.5, 0.0, 0.5), (0.5, 0.1, 0.2), (0.3, 0.05, 0.7), (0.9, 0.2, 0.9)]
)
def test_theorem_4_2_by_enumeration(seed: int, rho: float, error: float, delta: float) -> None:
    """Prune one of G by estimates off by at most `error`: the bound holds with a chance of at least 1 - delta."""
    rng, g = np.random.default_rng(seed), 9
    mu_G = rng.random(g)
    estimate_G = np.clip(mu_G + rng.uniform(-error, error, g), 0, 1)
    without_G = (mu_G.sum() - mu_G) / (g - 1)
    pruned = int(np.abs((estimate_G.sum() - estimate_G) / (g - 1) - rho).argmin())
    bound = np.abs(without_G - rho).min() + 2 * error + np.sqrt(np.log(2 / delta) / (2 * (g - 1)))
    left_M, broken = np.delete(mu_G, pruned), 0.0
    for outcome in product((0, 1), repeat=g - 1):
        y_M = np.array(outcome)
        broken += float(np.prod(np.where(y_M == 1, left_M, 1 - left_M))) * (abs(y_M.mean() - rho) > bound)
    assert broken <= delta
