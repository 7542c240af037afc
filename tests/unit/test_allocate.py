"""Sizes by what a rollout is worth: values against brute force, the optimal size, the mean, and the state."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from winnow.methods.group_kind import GroupJudge
from winnow.methods.size.allocate import Allocate, AllocatedSize, knapsack_values, signal_values
from winnow.methods.success import Success
from winnow.types import Group, Prompt, Rollout, Visit

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(60)]
SIZES = np.arange(2, 33)


def rule(size: int = 8, judge: GroupJudge | None = None, **options: object) -> AllocatedSize:
    built = Allocate(**options).build(size)  # type: ignore[arg-type]
    built.begin(PROMPTS, judge or GroupJudge())
    return built


def group(ordinal: int, rewards: list[float | None]) -> Group:
    rollouts = []
    for i, reward in enumerate(rewards):
        one, two = np.ones(1), np.zeros(1)
        rollouts.append(Rollout(i, (1,), one.astype(np.int64), one > 0, two.astype(np.float32), two.astype(np.int32)))
        rollouts[-1].reward = reward
    return Group(Visit(ordinal, 0, PROMPTS[ordinal]), rollouts)


def test_the_signal_is_that_of_all_groups() -> None:
    """By the rule of succession: the chance of a sequence is a product over its rollouts, one after the other."""
    for a, b, size in ((0.3, 1.7, 2), (5.0, 2.5, 4), (1.0, 9.0, 6)):
        signal = 0.0
        for rewards in itertools.product((0, 1), repeat=size):
            chance, right, wrong = 1.0, a, b
            for reward in rewards:
                chance *= (right if reward else wrong) / (right + wrong)
                right, wrong = right + reward, wrong + 1 - reward
            signal += chance * float(np.var(rewards))
        assert signal_values(a, b, np.array([size])) == pytest.approx([signal], rel=1e-12)


def test_knapsacks_value_is_its_mean_over_the_posterior() -> None:
    nodes, weights = np.polynomial.legendre.leggauss(200)
    p, weights = (nodes + 1) / 2, weights / 2
    for a, b in ((1.0, 1.0), (2.0, 8.0), (7.5, 1.5)):
        density = p ** (a - 1) * (1 - p) ** (b - 1)
        density /= (weights * density).sum()
        for size in (2, 5, 16):
            value = (1 - p**size - (1 - p) ** size) * p * (1 - p) ** 2
            expected = float((weights * density * value).sum())
            assert knapsack_values(a, b, np.array([size])) == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("value", ["signal", "knapsack"])
def test_a_size_is_the_best_for_its_price(value: str) -> None:
    values = {"signal": signal_values, "knapsack": knapsack_values}[value]
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.gamma(1, 3, 2) + 0.05
        sizing = rule(value=value, smallest=2, largest=32)
        sizing.posteriors.a_N[0], sizing.posteriors.b_N[0] = a, b
        sizing.log_price = float(np.log(rng.uniform(1e-5, 1e-2)))
        price = np.exp(sizing.log_price)
        (a,), (b,) = sizing.posteriors.of(np.array([0]))
        assert sizing.size_of(PROMPTS[0]) == SIZES[np.argmax(values(a, b, SIZES) - price * SIZES)]


def test_groups_have_the_wanted_mean_size_and_hard_prompts_more() -> None:
    sizing, rng = rule(), np.random.default_rng(0)
    rates = np.repeat([0.0, 0.1, 0.5, 0.98], 15)
    sizes = np.zeros((60, len(PROMPTS)))
    for visit in range(60):
        for ordinal in rng.permutation(60):
            prompt = PROMPTS[ordinal]
            size = sizing.size_of(prompt)
            sizes[visit, ordinal] = size
            sizing.learn(group(prompt.ordinal, (rng.random(size) < rates[prompt.ordinal]).astype(float).tolist()))
        sizing.observe({})
    assert rule().size_of(PROMPTS[0]) == 8, "a prompt never seen has the wanted size"
    assert sizes[20:].mean() == pytest.approx(8, rel=0.05)
    never, hard, half, solved = sizes[20:].reshape(40, 4, 15).mean((0, 2))
    assert hard > half > solved
    assert hard > never


def test_failed_rollouts_are_absent() -> None:
    sizing = rule()
    sizing.learn(group(0, [None, None, None]))
    assert not sizing.posteriors.a_N.any()
    sizing.learn(group(0, [None, 1.0, 0.0]))
    a, b = sizing.posteriors.of(np.array([0]))
    assert a + b == pytest.approx([2 + Allocate.strength])


def test_a_resume_goes_on_exactly() -> None:
    whole, parts, rng = rule(), rule(), np.random.default_rng(0)
    for step in range(6):
        if step == 3:
            saved = json.loads(json.dumps(parts.state_dict()))
            parts = rule()
            parts.load_state_dict(saved)
        for prompt in PROMPTS[:20]:
            size = whole.size_of(prompt)
            assert parts.size_of(prompt) == size
            rewards = rng.integers(0, 2, size).astype(float).tolist()
            for each in (whole, parts):
                each.learn(group(prompt.ordinal, rewards))
        for each in (whole, parts):
            each.observe({})
    assert whole.state_dict() == parts.state_dict()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="num_generations=4, the mean size, must lie between smallest=6 and"):
        Allocate(smallest=6).build(4)
    with pytest.raises(ValueError, match="sizes follow pass rates, but success is undecided"):
        rule(judge=GroupJudge(Success(declared=False, undecided="2 reward functions: a, b")))
