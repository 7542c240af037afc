"""Environments are closed: at the same time, before their group returns, and whatever fails."""

from __future__ import annotations

import asyncio

import pytest

from winnow.engine import LocalEngine, SamplingParams
from winnow.env.base import StepResult
from winnow.env.rewards.rewarder import Rewarder
from winnow.rollout.evaluate import run_jobs
from winnow.rollout.options import RolloutOptions
from winnow.rollout.runner import RolloutRunner
from winnow.types import Job, Visit

from ..builders.toy_rollouts import ToyTask, policy, run  # noqa: F401


class Ending:
    """Ends at its first step."""

    def __init__(self, events):
        self.events = events

    def reset(self):
        return " 7"

    async def step(self, text):
        return StepResult(None, 2.0, done=True)

    async def close(self):
        self.events.append("closed")


def task_of(make):
    task = ToyTask(make)
    task.max_turn_length = 3  # type: ignore[attr-defined]
    return task


def test_environments_are_closed_at_the_same_time(policy):
    """And before their group is returned."""
    closing, most = [0], [0]

    class Lingering(Ending):
        async def close(self):
            closing[0] += 1
            most[0] = max(most[0], closing[0])
            await asyncio.sleep(0.2)
            closing[0] -= 1
            self.events.append("closed")

    events: list[str] = []
    run(policy, task_of(lambda made: Lingering(events)))
    assert events == ["closed"] * 12
    assert most[0] >= 4


def test_environments_are_closed_when_the_engine_fails(policy):
    class Broken(LocalEngine):
        def step(self):
            raise MemoryError("no room")

    events: list[str] = []
    task = task_of(lambda made: Ending(events))
    options = {"eval": RolloutOptions(SamplingParams(12), 32, seed=0)}
    runner = RolloutRunner(Broken(*policy), task, policy[1], Rewarder([]), options)
    with pytest.raises(MemoryError):
        run_jobs(runner, [Job(Visit(i, 0, prompt), 2, "eval") for i, prompt in enumerate(task.train[:3])])
    assert events == ["closed"] * 6
