"""max@k against every subset, and against the exact gradient of E[max of k] on a small policy."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.methods.advantage import ADVANTAGES, max_at_k, rloo
from winnow.methods.group_kind import GroupJudge
from winnow.types import GroupKind

from ..builders.groups import make_group

reward = st.one_of(st.just(math.nan), st.sampled_from([0.0, 1.0, 0.1]), st.floats(-10, 10))


def over_all_subsets(rewards: list[float], k: int) -> list[float]:
    """The definition."""
    there = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    out = [math.nan if math.isnan(r) else 0.0 for r in rewards]
    if len(there) < max(k, 2):
        return out
    for i in there:
        others = [j for j in there if j != i]
        with_i = [max(rewards[j] for j in (i, *s)) for s in combinations(others, k - 1)]
        without_i = [max(rewards[j] for j in s) for s in combinations(others, min(k, len(others)))]
        out[i] = k * (math.fsum(with_i) / len(with_i) - math.fsum(without_i) / len(without_i))
    return out


@given(rewards=st.lists(reward, min_size=1, max_size=8), k=st.integers(1, 9))
def test_equals_brute_force_over_all_subsets(rewards: list[float], k: int) -> None:
    expected = over_all_subsets(rewards, k)
    np.testing.assert_allclose(max_at_k(np.array(rewards), k), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.1, 0.7), (0.3, 1.1)])
def test_with_too_few_failures_to_matter_there_is_no_signal(low: float, high: float) -> None:
    """Every k rollouts hold a success: all advantages are 0, and not what rounding leaves of them."""
    for n in range(2, 33):
        for k in range(2, n + 1):
            for failures in {1, (k - 1) // 2, k - 1} - {0, n}:
                rewards = [low] * failures + [high] * (n - failures)
                found = max_at_k(np.array(rewards), k)
                assert found.any() == (failures >= min(k, n - 1)), (n, k, failures)
                kind = GroupJudge(advantage=ADVANTAGES["max_at_k"](k=k)).kind(make_group(0, [*rewards]))
                assert (kind is GroupKind.SIGNAL) == found.any()


@given(rewards=st.lists(reward, min_size=1, max_size=12))
def test_k_1_is_rloo(rewards: list[float]) -> None:
    np.testing.assert_allclose(max_at_k(np.array(rewards), 1), rloo(np.array(rewards)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("G", "k"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4), (5, 2), (5, 5)])
def test_expected_gradient_is_that_of_the_expected_maximum(G: int, k: int) -> None:
    """Every G-tuple of outcomes of a categorical policy, weighted by its probability."""
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.3], dtype=torch.float64)
    logits = torch.tensor([0.5, 1.0, -0.7, 0.0], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    expected_max = sum(
        logp[list(outcome)].sum().exp() * rewards[list(outcome)].max() for outcome in product(range(4), repeat=k)
    )
    (exact,) = torch.autograd.grad(expected_max, logits, retain_graph=True)
    estimate = torch.zeros(4, dtype=torch.float64)
    p = logp.exp().detach()
    for outcome in product(range(4), repeat=G):
        chosen = list(outcome)
        advantages_G = max_at_k(rewards[chosen].numpy(), k).tolist()
        score = torch.zeros(4, dtype=torch.float64)
        for member, a in zip(chosen, advantages_G, strict=True):
            score += a * (torch.eye(4, dtype=torch.float64)[member] - p)  # gradient of logp of the outcome
        estimate += p[chosen].prod() * score / G
    torch.testing.assert_close(estimate, exact, rtol=1e-10, atol=1e-12)


def test_large_groups_neither_overflow_nor_lose_the_sum() -> None:
    rng = np.random.default_rng(0)
    for n, k in ((600, 1), (600, 2), (600, 300), (600, 599), (600, 600)):
        a = max_at_k(rng.normal(size=n), k)
        assert np.isfinite(a).all()
    binary = np.zeros(400)
    binary[:3] = 1.0
    for k in (2, 64, 200):  # a success counts for where k of the others would all have failed
        others_fail = math.comb(397, k) / math.comb(399, k)
        assert max_at_k(binary, k)[0] == pytest.approx(k * others_fail, rel=1e-9)


def test_equal_rewards_give_exactly_zero_and_few_members_no_signal() -> None:
    for k in (1, 3, 8):
        assert (max_at_k(np.full(8, 0.1), k) == 0).all()
    np.testing.assert_array_equal(max_at_k(np.array([1.0, 0.0, np.nan]), 3), [0.0, 0.0, np.nan])


def test_dtypes_and_order_are_kept() -> None:
    a = max_at_k(np.array([1.0, 0.0, 0.5], np.float32), 2)
    assert a.dtype == np.float32
    np.testing.assert_allclose(max_at_k(np.array([1.0, 0.0, 0.0]), 3), [3.0, 0.0, 0.0])
    np.testing.assert_allclose(a[[2, 0, 1]], max_at_k(np.array([0.5, 1.0, 0.0], np.float32), 2))


@pytest.mark.parametrize("k", [0, -1])
def test_bad_input_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=r"k\n.*greater than 0 "):
        ADVANTAGES["max_at_k"](k=k)


@pytest.mark.parametrize("k", [0, 1.5])
def test_an_impossible_k_is_refused(k: float) -> None:
    with pytest.raises(ValueError, match="k must be a whole number >= 1"):
        max_at_k(np.array([1.0, 0.0]), k)  # type: ignore[arg-type]
