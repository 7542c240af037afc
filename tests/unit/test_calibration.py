"""From scores to posteriors to survival: the stated properties, by simulation and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from winnow.base.array_json import pack
from winnow.methods.gate.arrol.calibration import BinnedPosterior, bin_of, survival_probabilities


def test_the_posterior_is_bayes_rule_with_laplace_smoothing() -> None:
    posterior = BinnedPosterior(bins=4, capacity=100, alpha=0.5)
    for score, label, weight in [(0.1, True, 1), (0.9, True, 2), (0.95, True, 1), (0.1, False, 1), (0.3, False, 4)]:
        posterior.observe(score, label, weight)
    positive = np.array([1, 0, 0, 3]) + 0.5
    negative = np.array([1, 4, 0, 0]) + 0.5
    prior = 4 / 9
    joint = prior * positive / positive.sum(), (1 - prior) * negative / negative.sum()
    np.testing.assert_allclose(posterior.table(), joint[0] / (joint[0] + joint[1]))
    assert bin_of(0.99, 4) == bin_of(1.0, 4) == 3


def test_buffers_slide_and_the_prior_outlives_a_full_one() -> None:
    posterior = BinnedPosterior(bins=2, capacity=50)
    rng = np.random.default_rng(0)
    for label in rng.random(400) < 0.2:
        posterior.observe(rng.random(), bool(label))
    assert posterior.labels == (50, 50)
    assert np.mean(posterior.table()) == pytest.approx(0.2, abs=0.1)  # 0.5 if the buffers were the prior
    for _ in range(50):
        posterior.observe(0.1, True)
        posterior.observe(0.9, False)
    assert posterior.table()[0] > 0.9
    assert posterior.table()[1] < 0.1


def test_weights_undo_what_survival_hides() -> None:
    rng = np.random.default_rng(1)
    posterior, full = BinnedPosterior(capacity=100_000), BinnedPosterior(capacity=100_000)
    for _ in range(20_000):
        score = rng.random()
        label, p = bool(rng.random() < 0.1 + 0.6 * score), 0.1 + 0.8 * score
        full.observe(score, label)
        if rng.random() < p:
            posterior.observe(score, label, 1 / p)
    np.testing.assert_allclose(posterior.table(), full.table(), atol=0.06)
    assert np.mean(posterior.table()) == pytest.approx(np.mean(full.table()), abs=0.01)


def test_labels_of_one_kind_and_none() -> None:
    posterior = BinnedPosterior()
    assert posterior.table()[0] == 0.5
    posterior.observe(0.3, False)
    assert (posterior.table() == 0).all()
    posterior.observe(0.3, True)
    assert 0 < posterior.table().min() <= posterior.table().max() < 1


def test_posterior_resumes_exactly() -> None:
    rng = np.random.default_rng(2)
    a, b = BinnedPosterior(capacity=20), BinnedPosterior(capacity=20)
    for i in range(90):
        a.observe(rng.random(), i % 3 == 0, 1 + rng.random())
    b.load_state_dict(a.state_dict())
    for posterior in (a, b):
        posterior.observe(0.5, True, 1.5)
    np.testing.assert_array_equal(a.table(), b.table())


@pytest.mark.parametrize("number", [-1, 20, 2**63 - 1])
def test_a_bin_that_is_none_is_not_loaded(number: int) -> None:
    """Counting does not look at bounds: NumPy would write beyond the end."""
    state = BinnedPosterior().state_dict()
    state["seen"][0] = {"columns": [pack(np.array([3, number])), pack(np.ones(2))]}
    with pytest.raises(ValueError, match="not from 0 to 19"):
        BinnedPosterior().load_state_dict(state)


BUFFERS = {mean: np.random.default_rng(3).beta(4 * mean, 4 * (1 - mean), 5_000) for mean in (0.15, 0.3, 0.5, 0.8)}


@pytest.mark.parametrize("keep_rate", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("mean", BUFFERS)
def test_mean_survival_is_the_keep_rate(mean: float, keep_rate: float) -> None:
    q = BUFFERS[mean]
    p = survival_probabilities(q, q, keep_rate)
    assert p.mean() == pytest.approx(keep_rate, abs=1e-6)
    assert p.min() >= 0.05
    assert p.max() <= 1


def test_below_the_floor_everybody_has_the_floor() -> None:
    np.testing.assert_allclose(survival_probabilities([0.1, 0.9], BUFFERS[0.3], 0.01), 0.05)


@pytest.mark.parametrize(("low", "high", "target"), [(0.3, 0.6, 0.48), (0.4, 0.8, 0.55), (0.0, 0.9, 0.5)])
def test_unclipped_survivors_are_balanced_from_below_and_from_above(low: float, high: float, target: float) -> None:
    rng = np.random.default_rng(4)
    q = rng.uniform(low, high, 400_000)
    p = survival_probabilities(q, q, 0.5, target, p_min=0.0)
    assert 0 < p.min() < p.max() < 1
    assert (p * q).sum() / p.sum() == pytest.approx(target, abs=1e-9)
    survives, right = rng.random(len(q)) < p, rng.random(len(q)) < q
    assert right[survives].mean() == pytest.approx(target, abs=0.004)


def test_clipped_survivors_come_nearer_to_the_target() -> None:
    for mean in (0.15, 0.3, 0.8):
        q = BUFFERS[mean]
        p = survival_probabilities(q, q)
        assert abs((p * q).sum() / p.sum() - 0.5) < abs(q.mean() - 0.5)


def test_strength_0_and_no_variance_keep_at_random() -> None:
    np.testing.assert_allclose(survival_probabilities([0.1, 0.9], BUFFERS[0.3], 0.4, strength=0.0), 0.4, atol=1e-6)
    np.testing.assert_allclose(survival_probabilities([0.1, 0.9], [0.3] * 9, 0.4), 0.4)
    np.testing.assert_allclose(survival_probabilities([0.1], [], 0.4), 0.4)


def test_theorem_4_2_holds_in_simulation() -> None:
    """w.p. >= 1 - d: |phat - rho| <= min_j |mu_-j - rho| + 2 eps + sqrt(log(2/d) / (2 (G - 1))).

    q is off by at most eps; one of G rollouts is dropped so that the mean posterior of the rest is nearest to rho.
    """
    rng, G, rho, eps, d, broken = np.random.default_rng(5), 16, 0.5, 0.05, 0.1, 0
    for _ in range(4_000):
        true_G = rng.beta(1, 2, G)
        q_G = np.clip(true_G + rng.uniform(-eps, eps, G), 0, 1)
        means_G = (q_G.sum() - q_G) / (G - 1)
        j = int(np.abs(means_G - rho).argmin())
        phat = np.delete(rng.random(G) < true_G, j).mean()
        true_means_G = (true_G.sum() - true_G) / (G - 1)
        bound = np.abs(true_means_G - rho).min() + 2 * eps + np.sqrt(np.log(2 / d) / (2 * (G - 1)))
        broken += abs(phat - rho) > bound
    assert broken / 4_000 <= d
