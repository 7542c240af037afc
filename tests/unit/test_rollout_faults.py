"""Environments that go wrong: each fails its own rollout, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from winnow.env.base import StepResult
from winnow.types import Fate

from ..builders.toy_rollouts import EchoEnv, ToyTask, policy, run

__all__ = ["policy"]  # a fixture


def test_a_broken_environment_fails_its_rollout_only(policy) -> None:
    groups = run(policy, ToyTask(make=lambda made: EchoEnv(2, fail_at=2 if made == 1 else None)), max_tokens=400)
    broken = groups[0].rollouts[1]
    assert (broken.fate, broken.reward) == (Fate.FAILED, None)
    assert "ConnectionError: the simulator went away" in broken.reason
    assert np.isnan(groups[0].rewards()).tolist() == [False, True, False, False]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1e40])
def test_a_reward_of_an_environment_that_is_no_number_fails(policy, reward: float) -> None:
    class Broken(EchoEnv):
        def step(self, text: str) -> StepResult:
            return StepResult(None, reward, True)

    for group in run(policy, ToyTask(make=lambda _: Broken(1)), max_tokens=400):
        assert all(r.fate == Fate.FAILED and r.reward is None for r in group.rollouts)


def leave() -> None:
    raise SystemExit(3)


def let_a_cancellation_out() -> None:
    raise asyncio.CancelledError


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (lambda: None, "must return a StepResult, not NoneType"),
        (lambda: ("8 9", 1.0, False, {}), "must return a StepResult, not tuple"),
        (lambda: StepResult("8", "1.0", True), "reward a number, not texts"),
        (lambda: StepResult("8", 1.0, "False"), "done must be true or false"),
        (lambda: StepResult(8, None, False), "must be a text or None, not int"),
        (lambda: StepResult("8", action=["look"]), "action must be a text or None, not list"),
        (lambda: StepResult("8", info=None), "info must be a mapping, not NoneType"),
        (leave, "SystemExit: 3"),
        (let_a_cancellation_out, "CancelledError"),
    ],
)
def test_an_answer_that_is_none_fails_its_rollout_only(policy, answer: Callable[[], Any], cause: str) -> None:
    class Odd(EchoEnv):
        def step(self, text: str) -> StepResult:
            return answer()

    task = ToyTask(make=lambda made: Odd(2) if made == 1 else EchoEnv(2))
    first, *others = run(policy, task, max_tokens=400)
    assert cause in first.rollouts[1].reason
    assert [r.fate for r in first.rollouts] == [None, Fate.FAILED, None, None]
    assert all(r.fate is None for group in others for r in group.rollouts)


def test_a_first_observation_that_is_none_and_a_close_that_leaves(policy) -> None:
    class Odd(EchoEnv):
        def reset(self) -> Any:
            return 7

        def close(self) -> None:
            leave()

    with pytest.warns(UserWarning, match="closing Odd raised SystemExit"):
        first, *_ = run(policy, ToyTask(make=lambda made: Odd(2) if made == 1 else EchoEnv(2)), max_tokens=400)
    assert "reset() must return a text or None, not int" in first.rollouts[1].reason


@pytest.mark.parametrize("length", [0, -1, 1.5, "5"])
def test_the_length_of_a_turn_is_checked(policy, length: Any) -> None:
    task = ToyTask()
    task.max_turn_length = length  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="max_turn_length must be at least 1 or None"):
        run(policy, task)


def test_attributes_of_a_users_own_say_nothing_to_the_runner(policy) -> None:
    class Own(EchoEnv):
        notes, abandoned, agents, label, environment = None, True, 2, 3, 4

    first, *_ = run(policy, ToyTask(make=lambda _: Own(1)), max_tokens=400)
    assert [(r.reward, r.fate, r.notes) for r in first.rollouts] == [(1.0, None, [])] * 4
