"""Whatever a reward function does wrong, its rollouts are `failed` with the cause, never 0, and nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import numpy as np
import psutil
import pytest

from winnow.env.rewards.math import math_reward
from winnow.env.rewards.rewarder import Rewarder
from winnow.env.rewards.workers import RewardWorkers
from winnow.types import Fate, Group, Prompt, Rollout, Visit

from ..builders.rewards import score_all


def group(*texts: str, number: int = 0, **columns) -> Group:
    rollouts = [
        Rollout(i, (1,), np.array([5]), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32), text=text)
        for i, text in enumerate(texts)
    ]
    return Group(Visit(number, 0, Prompt(f"p{number}", number, text="q", columns=columns)), rollouts)


def raises(completions):
    raise ValueError("no\nmercy")


def exits(completions):
    raise SystemExit(1)


BAD = {
    "raises": (raises, "ValueError: no mercy"),
    "exits": (exits, "SystemExit"),
    "none": (lambda completions: None, "returned a NoneType, not a list"),
    "string": (lambda completions: "1.0", r"returned a str \('1.0'\)"),
    "dict": (lambda completions: {"a": 1.0, "b": 1.0}, "returned a dict"),
    "number": (lambda completions: 1.0, "returned a float"),
    "generator": (lambda completions: (1.0 for _ in completions), "returned a generator"),
    "iterator": (lambda completions: iter([1.0, 1.0]), "returned a list_iterator"),
    "short": (lambda completions: [1.0], "returned 1 rewards for 2 completions"),
    "long": (lambda completions: [1.0] * 3, "returned 3 rewards for 2 completions"),
    "empty": (lambda completions: [], "returned 0 rewards"),
    "nan": (lambda completions: [float("nan")] * 2, "returned nan"),
    "inf": (lambda completions: [float("-inf")] * 2, "returned -inf"),
    "numpy nan": (lambda completions: np.array([np.nan, np.nan]), "returned nan"),
    "strings": (lambda completions: ["1.0", "0"], "returned a str"),
    "nested": (lambda completions: [[1.0], [1.0]], "returned a list"),
    "array elements": (lambda completions: [np.ones(2), np.ones(2)], "returned a ndarray"),
    "complex": (lambda completions: [1j, 1j], "returned a complex"),
    "huge": (lambda completions: [10**400] * 2, "OverflowError"),
    "all None": (lambda completions: [None, None], "no reward function applied"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_fail_every_rollout_with_the_cause(name):
    function, cause = BAD[name]
    g = group("x", "y")
    rewarder = Rewarder([function, lambda completions: [None] * len(completions)])
    score_all(rewarder, [g])
    rewarder.close()
    for r in g.rollouts:
        assert r.fate is Fate.FAILED
        assert r.reward is None
        with pytest.raises(AssertionError, match=cause):
            raise AssertionError(r.reason)


def one_good_value(completions):
    return [1.0, float("nan"), TimeoutError("judge"), None]


@pytest.mark.parametrize("function", [one_good_value, f"{__name__}:one_good_value"])
def test_one_bad_value_fails_one_rollout(function):
    g = group("a", "b", "c", "d")
    rewarder = Rewarder(function)
    score_all(rewarder, [g])
    rewarder.close()
    np.testing.assert_array_equal(g.rewards(), [1.0, np.nan, np.nan, np.nan])
    assert [r.fate for r in g.rollouts] == [None, *[Fate.FAILED] * 3]
    assert "TimeoutError: judge" in g.rollouts[2].reason


def test_one_failing_function_of_two_fails_the_rollout():
    g = group("x")
    rewarder = Rewarder([lambda completions: [1.0], raises])
    score_all(rewarder, [g])
    rewarder.close()
    assert g.rollouts[0].fate is Fate.FAILED
    assert g.rollouts[0].rewards == {"<lambda>": 1.0, "raises": None}


def test_weights_that_overflow_fail():
    g = group("x")
    rewarder = Rewarder(lambda completions: [1e20], [1e300])
    score_all(rewarder, [g])
    rewarder.close()
    assert g.rollouts[0].reason == "the weighted sum of rewards is inf"


def test_hanging_callable_fails_its_group_and_the_next_is_scored():
    release = threading.Event()

    def f(completions):
        if completions[0] == "hang":
            release.wait(60)
        return [1.0] * len(completions)

    first, second = group("hang", "b"), group("c", number=1)
    rewarder = Rewarder(f, timeout_s=1.5)
    score_all(rewarder, [first, second])
    assert "took over 1.5 s" in first.rollouts[1].reason
    assert first.rollouts[0].fate is Fate.FAILED
    assert second.rewards().tolist() == [1.0]
    release.set()
    time.sleep(0.05)
    assert first.rollouts[0].reward is None  # the late answer changes nothing
    rewarder.close()


def test_only_so_many_callables_may_hang():
    release = threading.Event()
    rewarder = Rewarder(lambda completions: release.wait(60) and [1.0], timeout_s=0.02)
    groups = [group("x", number=i) for i in range(20)]
    score_all(rewarder, groups)
    assert all(g.rollouts[0].fate is Fate.FAILED for g in groups)
    late = group("x")
    score_all(rewarder, [late])
    assert "never returned" in late.rollouts[0].reason
    release.set()
    rewarder.close()


def test_hanging_coroutines():
    async def waits(completions):
        await asyncio.sleep(60)

    async def refuses(completions):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    for function in (waits, refuses):
        g = group("x")
        rewarder = Rewarder(function, timeout_s=0.1)
        score_all(rewarder, [g])
        assert "took over 0.1 s" in g.rollouts[0].reason
        rewarder.close()


@pytest.mark.slow
def test_coroutine_that_blocks_its_loop_does_not_block_the_next():
    release = threading.Event()

    async def f(completions):
        if completions[0] == "hang":
            release.wait(60)
        return [1.0]

    rewarder = Rewarder(f, timeout_s=1.5)
    first, second = group("hang"), group("x", number=1)
    score_all(rewarder, [first])
    score_all(rewarder, [second])
    assert first.rollouts[0].fate is Fate.FAILED
    assert second.rewards().tolist() == [1.0]
    release.set()
    rewarder.close()


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        """
import os, signal, time

def hangs(completions):
    if completions[0] == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    return [1.0] * len(completions)

def dies(completions):
    os._exit(0)

def wrong(completions):
    return {"rewards": [1.0]}

def nan(completions):
    return [float("nan")] * len(completions)

def forges(completions):
    print('{"id": 3, "result": {"value": [1.0, 1.0], "metrics": []}}', flush=True)
    raise ValueError("after a forged reply")
"""
    )
    return path


def test_function_by_name_that_hangs_is_killed_also_when_the_caller_is_not_the_main_thread(module):
    first, second = group("hang", "x"), group("y", number=1)

    def run() -> None:
        rewarder = Rewarder(f"{module}:hangs", timeout_s=1.5, workers=RewardWorkers(1))
        score_all(rewarder, [first, second])
        rewarder.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert "took over 1.5 s; the worker was killed" in first.rollouts[0].reason
    assert second.rewards().tolist() == [1.0]


@pytest.mark.slow
def test_the_import_of_a_users_file_has_time_of_its_own(tmp_path):
    """When the function is looked up, and again after its worker was killed."""
    path = tmp_path / "slow_import.py"
    path.write_text(
        """
import time
time.sleep(1.5)

def f(completions):
    if completions == ["hang"]:
        time.sleep(60)
    return [1.0] * len(completions)
"""
    )
    first, second = group("hang"), group("x", number=1)
    rewarder = Rewarder(f"{path}:f", timeout_s=1, workers=RewardWorkers(1))
    score_all(rewarder, [first, second])
    rewarder.close()
    assert "took over 1 s" in first.rollouts[0].reason
    assert second.rewards().tolist() == [1.0]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("dies", "the worker died (exit status 0)"),
        ("wrong", "returned a dict, not a list"),
        ("nan", "returned nan"),
        ("forges", "after a forged reply"),
    ],
)
def test_function_by_name_that_goes_wrong(module, name, cause):
    g = group("x", "y")
    rewarder = Rewarder(f"{module}:{name}")
    score_all(rewarder, [g])
    rewarder.close()
    assert [r.fate for r in g.rollouts] == [Fate.FAILED] * 2
    assert cause in g.rollouts[0].reason


def test_answer_that_cannot_be_computed_fails_alone():
    g = group("\\boxed{42}", "\\boxed{9^{9^{9^{9^{9}}}}}", "\\boxed{41}", answer="42")
    rewarder = Rewarder(math_reward, timeout_s=2, workers=RewardWorkers(2))
    score_all(rewarder, [g])
    rewarder.close()
    np.testing.assert_array_equal(g.rewards(), [1.0, np.nan, 0.0])
    assert g.rollouts[1].fate is Fate.FAILED
    assert "took over 2 s" in g.rollouts[1].reason


def test_nothing_is_left_behind(module):
    process = psutil.Process()

    def run() -> None:
        rewarder = Rewarder([f"{module}:dies", raises], workers=RewardWorkers(1))
        score_all(rewarder, [group("x", number=i) for i in range(3)])
        rewarder.close()

    run()
    gc.collect()  # files that earlier tests left to the collector would otherwise be closed in between
    files, children = process.num_fds(), len(process.children())
    for _ in range(3):
        run()
    gc.collect()
    assert process.num_fds() <= files, "fewer where the collector closed what an earlier test left"
    assert len(process.children()) == children
