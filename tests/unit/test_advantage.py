from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.methods.advantage import ADVANTAGES, dr_grpo, grpo, max_at_k, opo, rloo

from ..builders.groups import make_group

reward = st.one_of(st.just(math.nan), st.sampled_from([0.0, 1.0, 0.1]), st.floats(-10, 10))
groups = st.lists(reward, min_size=1, max_size=12)


def brute_force(name: str, rewards: list[float]) -> list[float]:
    """The definitions, one member at a time, in pure Python float64."""
    there = [r for r in rewards if not math.isnan(r)]
    out = []
    for i, r in enumerate(rewards):
        if math.isnan(r):
            out.append(math.nan)
        elif len(there) < 2 or len(set(there)) == 1:
            out.append(0.0)
        elif name == "rloo":
            others = [x for j, x in enumerate(rewards) if j != i and not math.isnan(x)]
            out.append(r - math.fsum(others) / len(others))
        else:
            mean = math.fsum(there) / len(there)
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in there) / len(there))
            out.append((r - mean) / (std + 1e-6) if name == "grpo" else r - mean)
    return out


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
@given(rewards=groups)
def test_equals_brute_force(name: str, rewards: list[float]) -> None:
    function = {"grpo": grpo, "rloo": rloo, "dr_grpo": dr_grpo}[name]
    expected = brute_force(name, rewards)
    found = function(np.array(rewards, dtype=np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", [grpo, rloo, dr_grpo])
def test_equal_rewards_give_exactly_zero(function) -> None:
    assert (function(np.full(8, 0.1)) == 0).all()


def test_one_success_among_failures_is_signal_under_every_advantage() -> None:
    """A leave-one-out std would make it 0 / 0 for the success (and non-signal)."""
    for function in (grpo, rloo, dr_grpo):
        a = function(np.array([1.0, 0.0, 0.0, 0.0]))
        assert a[0] > 0 > a[1]
        assert np.isfinite(a).all()


def test_integer_rewards_keep_their_fractions() -> None:
    np.testing.assert_allclose(dr_grpo(np.array([1, 0, 0, 0])), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("function", [grpo, rloo, dr_grpo, partial(max_at_k, k=2), partial(opo, tokens_G=np.ones(2))])
@pytest.mark.parametrize("rewards_G", [np.zeros((2, 2)), np.array([1.0, np.inf])])
def test_bad_input_is_refused(function, rewards_G: np.ndarray) -> None:
    with pytest.raises(ValueError, match="finite, one for each member"):
        function(rewards_G)


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize("name", [name for name, cls in ADVANTAGES.items() if not cls.greedy_baseline])
@given(rewards=groups)
def test_table_entries_keep_absent_members_absent(name: str, rewards: list[float]) -> None:
    (a,) = ADVANTAGES[name]().of_batch([make_group(0, [None if np.isnan(r) else r for r in rewards])])
    np.testing.assert_array_equal(np.isnan(a), np.isnan(rewards))


def test_grpo_eps_is_an_option() -> None:
    np.testing.assert_allclose(ADVANTAGES["grpo"](eps=0.5)(np.array([1.0, 0.0])), [0.5, -0.5])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_grpo_in_the_form_of_trl(size: int) -> None:
    """The sample's standard deviation, and that of the members who have a reward."""
    rewards_G = np.append(np.arange(size, dtype=float), np.nan)
    found = ADVANTAGES["grpo"](ddof=1, eps=1e-4)(rewards_G)
    present = rewards_G[:-1]
    np.testing.assert_allclose(found[:-1], (present - present.mean()) / (present.std(ddof=1) + 1e-4))
    assert np.isnan(found[-1])
    np.testing.assert_allclose(found[:-1], grpo(present, eps=0.0) * ((size - 1) / size) ** 0.5, rtol=1e-3)
