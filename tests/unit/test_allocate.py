"""Sizes by what a rollout is worth: values against brute force, the optimal size, the mean, and the state."""

from __future__ import annotations

import itertools
import json
from typing import Literal

import numpy as np
import pytest

from winnow.methods.group_kind import GroupJudge
from winnow.methods.size.allocate import Allocate, AllocatedSize, knapsack_gains, signal_gains
from winnow.methods.success import Success
from winnow.types import Prompt

from ..builders.groups import make_group

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(60)]


def rule(size: int = 8, judge: GroupJudge | None = None, **options: object) -> AllocatedSize:
    built = Allocate(**options).build(size)  # type: ignore[arg-type]
    built.begin(PROMPTS, judge or GroupJudge())
    return built


def signal_value(a: float, b: float, size: int) -> float:
    """By the rule of succession: the chance of a sequence is a product over its rollouts, one after the other."""
    signal = 0.0
    for rewards in itertools.product((0, 1), repeat=size):
        chance, right, wrong = 1.0, a, b
        for reward in rewards:
            chance *= (right if reward else wrong) / (right + wrong)
            right, wrong = right + reward, wrong + 1 - reward
        signal += chance * float(np.var(rewards))
    return signal


def test_the_signal_gained_is_that_of_all_groups() -> None:
    for a, b, size in ((0.3, 1.7, 2), (5.0, 2.5, 4), (1.0, 9.0, 6)):
        gained = signal_value(a, b, size + 1) - signal_value(a, b, size)
        assert np.exp(signal_gains(a, b, np.array([size]))) == pytest.approx([gained], rel=1e-9)


def knapsack_value(a: float, b: float, size: int) -> float:
    """By quadrature over the posterior."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    p, weights = (nodes + 1) / 2, weights / 2
    density = p ** (a - 1) * (1 - p) ** (b - 1)
    density /= (weights * density).sum()
    return float((weights * density * (1 - p**size - (1 - p) ** size) * p * (1 - p) ** 2).sum())


def test_knapsacks_gain_is_its_mean_over_the_posterior() -> None:
    for a, b in ((1.0, 1.0), (2.0, 8.0), (7.5, 1.5)):
        for size in (2, 5, 16):
            gained = knapsack_value(a, b, size + 1) - knapsack_value(a, b, size)
            assert np.exp(knapsack_gains(a, b, np.array([size]))) == pytest.approx([gained], rel=1e-5)


@pytest.mark.parametrize("value", ["signal", "knapsack"])
def test_a_size_is_the_best_for_its_price(value: Literal["signal", "knapsack"]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.gamma(2, 2, 2) + 1
        sizing = rule(value=value, smallest=2, largest=9)
        sizing.posteriors.a_N[0], sizing.posteriors.b_N[0] = a, b
        sizing.log_price = float(np.log(rng.uniform(1e-4, 1e-2)))
        price = np.exp(sizing.log_price)
        (a,), (b,) = sizing.posteriors.for_prompts(np.array([0]))
        value_of = {"signal": signal_value, "knapsack": knapsack_value}[value]
        worth = [value_of(a, b, size) - price * size for size in range(2, 10)]
        assert sizing.size_for(PROMPTS[0]) == 2 + int(np.argmax(worth))


@pytest.mark.parametrize("value", ["signal", "knapsack"])
@pytest.mark.parametrize("strength", [1e-3, 1e6])
def test_extreme_posteriors_have_sizes(value: str, strength: float) -> None:
    sizing = rule(64, value=value, strength=strength)
    for _ in range(3):
        for prompt in PROMPTS[:4]:
            size = sizing.size_for(prompt)
            assert sizing.smallest <= size <= sizing.largest
            sizing.observe_group(make_group(prompt.ordinal, [float(prompt.ordinal % 2)] * size))
    assert sizing.log_price is not None
    assert np.isfinite(sizing.log_price)


@pytest.mark.parametrize("value", ["signal", "knapsack"])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_prompt_never_or_always_solved_has_a_size_in_a_long_run(value: str, reward: float) -> None:
    """Of a state that an earlier version saved at 0, too."""
    sizing = rule(value=value, forget=0.5)
    for _ in range(400):
        size = sizing.size_for(PROMPTS[0])
        sizing.observe_group(make_group(0, [reward] * size))
        sizing.observe_step({})
    assert min(sizing.posteriors.a_N[0], sizing.posteriors.b_N[0]) > 0
    sizing.posteriors.a_N[0] = 0.0
    assert sizing.smallest <= sizing.size_for(PROMPTS[0]) <= sizing.largest


def test_groups_have_the_wanted_mean_size_and_hard_prompts_more() -> None:
    sizing, rng = rule(), np.random.default_rng(0)
    rates = np.repeat([0.0, 0.1, 0.5, 0.98], 15)
    sizes = np.zeros((60, len(PROMPTS)))
    for visit in range(60):
        for ordinal in rng.permutation(60):
            prompt = PROMPTS[ordinal]
            size = sizing.size_for(prompt)
            sizes[visit, ordinal] = size
            sizing.observe_group(
                make_group(prompt.ordinal, (rng.random(size) < rates[prompt.ordinal]).astype(float).tolist())
            )
        sizing.observe_step({})
    assert rule().size_for(PROMPTS[0]) == 8, "a prompt never seen has the wanted size"
    assert sizes[20:].mean() == pytest.approx(8, rel=0.05)
    never, hard, half, solved = sizes[20:].reshape(40, 4, 15).mean((0, 2))
    assert hard > half > solved
    assert hard > never


def test_failed_rollouts_are_absent() -> None:
    sizing = rule()
    sizing.observe_group(make_group(0, [None, None, None]))
    assert not sizing.posteriors.a_N.any()
    sizing.observe_group(make_group(0, [None, 1.0, 0.0]))
    a, b = sizing.posteriors.for_prompts(np.array([0]))
    assert a + b == pytest.approx([2 + Allocate.strength])


def test_a_resume_goes_on_exactly() -> None:
    whole, parts, rng = rule(), rule(), np.random.default_rng(0)
    for step in range(6):
        if step == 3:
            saved = json.loads(json.dumps(parts.state_dict()))
            parts = rule()
            parts.load_state_dict(saved)
        for prompt in PROMPTS[:20]:
            size = whole.size_for(prompt)
            assert parts.size_for(prompt) == size
            rewards = rng.integers(0, 2, size).astype(float).tolist()
            for each in (whole, parts):
                each.observe_group(make_group(prompt.ordinal, rewards))
        for each in (whole, parts):
            each.observe_step({})
    assert whole.state_dict() == parts.state_dict()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="num_generations=4, the mean size, must lie between smallest=6 and"):
        Allocate(smallest=6).build(4)
    with pytest.raises(ValueError, match="sizes follow pass rates, but success is undecided"):
        rule(judge=GroupJudge(Success(declared=False, undecided="2 reward functions: a, b")))
