from __future__ import annotations

import json
import random
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.base.errors import ConfigError
from winnow.config.options import method
from winnow.methods.size import SIZES, GroupSize
from winnow.methods.size.adaptive_k import AdaptiveK
from winnow.types import Prompt

PROMPT = Prompt("p", 0, text="")

shares = st.lists(st.floats(0, 1), max_size=60)


def sizes(size: GroupSize, history: list[float]) -> list[int]:
    """The size of each group-launching step, the one after the last value included."""
    out = [size.size_for(PROMPT)]
    for share in history:
        size.observe_step({"frac_reward_zero_std": share, "loss": 1.0})
        out.append(size.size_for(PROMPT))
    return out


@given(shares, st.floats(0, 1, exclude_max=True), st.integers(1, 7))
def test_one_way_is_equation_5_with_the_whole_history(history: list[float], tau: float, window: int) -> None:
    size, expected = 4, [4]
    for t in range(1, len(history) + 1):
        if t >= window and sum(history[t - window : t]) / window > tau + 1e-9:
            size = 8
        expected.append(size)
    assert sizes(AdaptiveK(tau=tau, window=window).build(4), history) == expected


def test_the_papers_constants_and_the_strict_threshold() -> None:
    o = AdaptiveK()
    assert (o.tau, o.window, o.tau_down) == (0.5, 5, None)
    assert sizes(o.build(4), [1.0] * 4) == [4] * 5, "not before W observations"
    assert sizes(o.build(4), [1.0] * 5) == [4] * 5 + [8]
    assert sizes(o.build(4), [0.5] * 20) == [4] * 21, "over tau, not at it"
    assert sizes(o.build(4), [0.0] * 5 + [1.0] * 3 + [0.0] * 40)[-41:] == [8] * 41, "high stays"


def test_a_mean_that_is_tau_does_not_exceed_it() -> None:
    """Five shares of 7 to 33 groups whose mean is exactly 1/2 or 1/4; as floats every thirtieth exceeds it."""
    draw, ties = random.Random(0), 0
    while ties < 300:
        groups = draw.randint(7, 33)
        zero = [draw.randint(0, groups) for _ in range(5)]
        tau = draw.choice([0.5, 0.25])
        history = [n / groups for n in zero]
        if Fraction(sum(zero), 5 * groups) == Fraction(tau):
            ties += 1
            one_way = AdaptiveK(tau=tau).build(4)
            one_way.load_state_dict({"size": 4, "history": history, "steps": None})
            assert one_way._next_size() == 4
            two_way = AdaptiveK(tau=0.9, tau_down=tau, dwell=1).build(4)
            two_way.load_state_dict({"size": 8, "history": history, "steps": 9})
            assert two_way._next_size() == 8


def test_two_way_goes_back_by_what_was_seen_since_the_change() -> None:
    size = AdaptiveK(tau=0.5, window=3, tau_down=0.4, dwell=1).build(4)
    assert sizes(size, [0.9, 0.9, 0.9, 0.1, 0.1, 0.1]) == [4, 4, 4, 8, 8, 8, 4], "0.9 belongs to the old size"
    assert sizes(size, [0.9, 0.9, 0.9]) == [4, 4, 4, 8]


def test_between_the_thresholds_nothing_moves() -> None:
    size = AdaptiveK(tau=0.5, window=1, tau_down=0.3, dwell=1).build(4)
    assert sizes(size, [0.4, 0.5, 0.3]) == [4] * 4
    assert sizes(size, [0.6, 0.4, 0.3, 0.5, 0.6]) == [4] + [8] * 5


@given(shares, st.integers(1, 8), st.integers(1, 4))
def test_changes_are_at_least_dwell_and_a_window_apart(history: list[float], dwell: int, window: int) -> None:
    got = sizes(AdaptiveK(tau=0.5, window=window, tau_down=0.4, dwell=dwell).build(4), history)
    changes = [t for t in range(1, len(got)) if got[t] != got[t - 1]]
    assert all(b - a >= max(dwell, window) for a, b in pairwise(changes))
    if changes:
        first = next(t for t in range(window, len(got)) if sum(history[t - window : t]) / window > 0.5)
        assert changes[0] == first, "the first rise is the paper's, dwell or not"


def test_a_step_without_the_metric_is_no_observation_but_passes_time() -> None:
    size = AdaptiveK(window=2).build(4)
    carried = {"frac_reward_zero_std": 0.0, "groups/rolled_out": 0.0}
    for stats in ({"frac_reward_zero_std": 1.0, "groups/rolled_out": 4.0}, {}, {"loss": 0.0}, carried):
        size.observe_step(stats)
    assert size.size_for(PROMPT) == 4
    size.observe_step({"frac_reward_zero_std": 1.0})
    assert size.size_for(PROMPT) == 8
    slow = AdaptiveK(window=1, tau_down=0.2, dwell=3).build(4)
    for stats in ({"frac_reward_zero_std": 1.0}, {}, {}):
        slow.observe_step(stats)
    assert slow.size_for(PROMPT) == 8
    slow.observe_step({"frac_reward_zero_std": 0.0})
    assert slow.size_for(PROMPT) == 4


@given(shares, st.integers(0, 60), st.sampled_from([None, 0.1, 0.3]))
def test_resume_is_exact_through_json(history: list[float], k: int, tau_down: float | None) -> None:
    options = AdaptiveK(tau=0.5, window=3, tau_down=tau_down, **({} if tau_down is None else {"dwell": 4}))
    whole = options.build(4)
    expected = sizes(whole, history)
    part = options.build(4)
    sizes(part, history[:k])
    resumed = options.build(4)
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert sizes(resumed, history[k:]) == expected[min(k, len(history)) :]
    assert resumed.state_dict() == whole.state_dict()


def test_bounds_come_from_num_generations_unless_given() -> None:
    for options, bounds in (({}, (6, 12)), ({"base": 2}, (2, 12)), ({"base": 3, "high": 5}, (3, 5))):
        size = AdaptiveK(**options).build(6)
        assert (size.smallest, size.largest) == bounds
        assert size.size_for(PROMPT) == bounds[0]
    fixed = SIZES["fixed"]().build(6)
    assert (fixed.smallest, fixed.largest) == (6, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 1}, r"base: .*greater than or equal to 2 "),
        ({"tau": 1.5}, r"tau: .*less than 1 "),
        ({"tau": 1.0}, r"tau: .*less than 1 "),
        ({"tau_down": 0.0}, "tau_down must lie"),
        ({"tau_down": 0.5}, "tau_down must lie"),
        ({"tau_down": -0.1}, "tau_down must lie"),
        ({"window": 0}, r"window: .*greater than 0 "),
        ({"tau_down": 0.1, "dwell": 0}, r"dwell: .*greater than 0 "),
        ({"dwell": 3}, "dwell has no effect without tau_down"),
        ({"tau": float("nan")}, r"tau: .*less than 1 "),
        ({"taudown": 0.1}, "Did you mean 'tau_down'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method(SIZES, {"name": "adaptive_k", **options}, "group_size")


@pytest.mark.parametrize("options", [{"high": 4}, {"base": 8}, {"base": 9, "high": 5}])
def test_sizes_that_do_not_grow_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"base=\d must be below high=\d"):
        AdaptiveK(**options).build(4)
