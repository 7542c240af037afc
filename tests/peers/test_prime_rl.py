"""Winnow's sampler for prime-rl with the episodes of verifiers that prime-rl passes to a sampler."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

pytest.importorskip("verifiers.v1")

import verifiers.v1 as vf

from winnow.integrations.prime_rl import WinnowSampler


def tasks(count: int = 6) -> list[Any]:
    return [vf.Task(vf.TaskData(idx=n, prompt=f"task {n}")) for n in range(count)]


def episode(task: Any, reward: float | None, *, ok: bool = True) -> Any:
    """A finalized episode of one trace, as prime-rl's own tests build it."""
    seen = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    rewards = {"reward": None if reward is None else vf.Reward(score=reward)}
    sampled = vf.MessageNode(message=vf.AssistantMessage(content="4"), sampled=True, token_ids=[7], mask=[True])
    agent = vf.AgentInfo(config=vf.AgentConfig())
    trace = vf.Trace(task=seen, agent=agent, rewards=rewards, ok=ok, nodes=[sampled])
    group = vf.GroupInfo(id=str(uuid.uuid4()))
    return vf.Episode(env=vf.EnvInfo(id="sums", name="sums"), task=trace.task, group=group, traces=[trace])


def test_it_learns_from_episodes() -> None:
    sampler = WinnowSampler(tasks(), "greso", groups_per_step=2)
    for _ in range(40):
        task = next(sampler)
        solved = task.data.idx % 3 == 0
        sampler.observe([episode(task, float(solved or i % 2)) for i in range(4)])
    z_N = sampler._selector.z_N  # type: ignore[attr-defined]
    assert [z > 0 for z in z_N] == [n % 3 == 0 for n in range(6)]
    assert sampler.metrics()["epoch"] > 6, "solved tasks are skipped"


def test_an_episode_with_an_error_is_absent() -> None:
    sampler = WinnowSampler(tasks(), "greso", groups_per_step=1)
    task = next(sampler)
    scored, broken, unscored = episode(task, 0.0), episode(task, 0.0, ok=False), episode(task, None)
    sampler.observe([scored, scored, broken, unscored])
    z_N = sampler._selector.z_N  # type: ignore[attr-defined]
    assert z_N.max() == 0.5
