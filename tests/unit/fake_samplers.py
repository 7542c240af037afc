"""Samplers elsewhere without any process: the test speaks for them."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from winnow.config import validate
from winnow.sampler import pool
from winnow.sampler.base import PoolOptions
from winnow.sampler.handle import Message, SamplerHandle, Stage
from winnow.sampler.pool import SamplerPool
from winnow.types import Group, Job, Prompt, Purpose, Rollout, Visit

from ..builders.resolving import sampler_context

PROMPTS = [Prompt(f"p{i}", i, text="p") for i in range(9)]
HELD_OUT = [Prompt(f"t{i}", i, text="t") for i in range(9)]
ZEROS = (np.zeros(2, np.int64), np.ones(2, bool), np.zeros(2, np.float32), np.zeros(2, np.int32))


class FakeChannel:
    """Remembers what it is told; the test speaks for the sampler. It has a place where there is room."""

    room = True

    def __init__(self, inbox: queue.SimpleQueue[Message]) -> None:
        self.inbox = inbox
        self.told: list[dict[str, Any]] = []
        self.killed = False
        if self.room:
            self.says({"placed": "here"})

    def send(self, content: dict[str, Any]) -> None:
        self.told.append(content)

    def kill(self) -> str:
        self.killed = True
        return "signal SIGKILL"

    def says(self, content: dict[str, Any] | None) -> None:
        self.inbox.put(Message(self, content))


class FakeTransport:
    """Weights that stay where they are."""

    def __init__(self) -> None:
        self.version = -1
        self.bytes = 0
        self.removed = False

    def write(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    def message(self) -> dict[str, Any]:
        return {"weights": "somewhere", "version": self.version}

    def remove(self) -> None:
        self.removed = True


def group(visit: Visit, purpose: Purpose = "train") -> Group:
    return Group(visit, [Rollout(0, (1,), *ZEROS, reward=1.0)], purpose=purpose)


def visit(number: int, prompts: list[Prompt] = PROMPTS) -> Visit:
    return Visit(number, 0, prompts[number])


def job(number: int, size: int = 1) -> Job:
    return Job(visit(number), size)


def channel_of_member(member: SamplerHandle) -> FakeChannel:
    assert isinstance(member.channel, FakeChannel)
    return member.channel


def channel_of(sampler: SamplerPool, slot: int) -> FakeChannel:
    return channel_of_member(sampler._members[slot])


def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a pool of two samplers that work; `max_turns` is the task's."""
    monkeypatch.setattr(pool, "fingerprints", lambda task, tokenizer: {})
    monkeypatch.setattr(pool, "POLL_S", 0.01)
    monkeypatch.setattr(pool, "REDISPATCH_DELAY_S", 0.0)
    monkeypatch.setattr(pool, "STOP_S", 0.01)
    config = validate({"model": "m", "env": "countdown", "output_dir": str(tmp_path)})

    def build(max_turns: int = 1, transport: Any = None) -> SamplerPool:
        task: Any = SimpleNamespace(train=PROMPTS, test=HELD_OUT, max_turns=max_turns)
        context = sampler_context(config, task, None, behind=2)
        options = PoolOptions(samplers=2, max_restarts=2)
        sampler = SamplerPool(options, context, transport or FakeTransport(), FakeChannel)
        sampler.publish({}, [], 0)
        sampler.poll()
        for member in sampler._members:
            working(member)
        return sampler

    return build


def working(member: SamplerHandle) -> None:
    member.stage = Stage.READY
    member.last_message_at = member.last_progress_at = float("inf")


def evaluation(n: int, size: int = 1) -> list[Job]:
    return [Job(visit(i, HELD_OUT), size, "eval") for i in range(n)]
