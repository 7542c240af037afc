"""State of one remote sampler as the learner knows it: channel, stage, jobs in flight, metrics.

    WAITING ----> PLACED ------> BUILT ------> READY
           placed        built         loaded        messages of the sampler
      |             |             |             |
      +-------------+-------------+-------------+---> killed, and replaced by a new handle that is WAITING

A waiting sampler gets no messages and has no time limits. Once placed it gets `start` and jobs, once built it gets
weights, and once ready it runs the jobs. There is no stage after the end: the pool forgets the handle, relaunches its
jobs and ignores what the channel still delivers.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..types import Fate, Group, Job, Rollout


class Channel(Protocol):
    """Connection to one sampler: its messages go into the inbox it was opened with, its end as None.

    `{"placed": where}` comes first, once the sampler is scheduled. Nothing is sent to it before.
    """

    def send(self, content: dict[str, Any]) -> None:
        """Send without waiting for the other side to read."""
        ...

    def kill(self) -> str:
        """Kill the sampler and all it started, if it still runs; return how it ended and its last output."""
        ...


class Message(NamedTuple):
    channel: Channel
    content: dict[str, Any] | None
    """None: its output is closed for good."""


Inbox = queue.SimpleQueue[Message]


class InFlightJob(NamedTuple):
    """A launched job."""

    job: Job
    again: bool = False
    """Whether it was launched before, on a sampler that failed."""

    @property
    def key(self) -> tuple[str, int]:
        return self.job.purpose, self.job.visit.number


class Stage(IntEnum):
    """Life of a sampler up to its end; each stage includes those before."""

    WAITING = 0
    """Requested, without a place."""
    PLACED = 1
    """Scheduled: it builds its engine, and starts with the newest weights."""
    BUILT = 2
    """Its engine is built, so it is sent weights."""
    READY = 3
    """It has loaded weights and runs jobs."""


@dataclass
class MetricsWindow:
    """Metrics of a slot's sampler, and of those it replaced, since they were last read."""

    spent: Counter[str] = field(default_factory=Counter)
    """Seconds, idle seconds and sampled tokens that they reported."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Seconds by what they were spent on."""
    restarts: int = 0
    groups: int = 0
    lag: int = 0
    """Most versions that its weights were behind the newest when the next ones came."""


@dataclass(eq=False)
class SamplerHandle:
    """One sampler; see the module's docstring."""

    slot: int
    channel: Channel
    stage: Stage = Stage.WAITING
    where: str = ""
    """Its node; empty for this machine, and while it waits for a place."""
    version: int = -1
    """Policy version of the weights that it has reported, or will start with."""
    dtype: str = "unknown"
    """Compute type of its engine."""
    consecutive_failures: int = 0
    """Failures in a row of this slot's samplers, without a finished group in between."""
    flights: dict[tuple[str, int], InFlightJob] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    """MiB of its memory, peak GiB of its GPU."""
    last_message_at: float = field(default_factory=time.monotonic)
    last_progress_at: float = field(default_factory=time.monotonic)
    """Time of its last message other than `busy`."""
    window: MetricsWindow = field(default_factory=MetricsWindow)

    @property
    def placed(self) -> bool:
        return self.stage >= Stage.PLACED

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY

    def note_message(self, content: Mapping[str, Any] | None) -> None:
        """Note the time of a message."""
        self.last_message_at = time.monotonic()
        if content is None or "busy" not in content:
            self.last_progress_at = self.last_message_at

    def overdue(self, timeout_s: float, busy_s: float) -> str:
        """Return how it exceeds its time limits: silent for `timeout_s`, or in one call for `busy_s`; else empty."""
        now = time.monotonic()
        if now - self.last_message_at > timeout_s:
            return f"sent nothing for {timeout_s:g} s and was killed"
        if now - self.last_progress_at > busy_s:
            longer = "if a download or a task's games take longer there, raise sync.timeout_s"
            return f"was busy starting or loading weights for {busy_s:g} s ({longer}) and was killed"
        return ""

    @property
    def name(self) -> str:
        return f"sampler {self.slot}" + (f" on {self.where}" if self.where else "")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this window. Tokens are those of finished groups."""
        metrics = {"restarts": float(self.window.restarts), "groups": float(self.window.groups)}
        if self.placed:
            metrics["lag"] = float(self.window.lag)
        spent = self.window.spent
        if spent["seconds"]:
            metrics["idle"] = spent["idle_s"] / spent["seconds"]
            metrics["tokens_per_s"] = spent["tokens"] / spent["seconds"]
        metrics |= self.memory
        return {f"sampler/{self.slot}/{name}": value for name, value in metrics.items()}


def failed_group(job: Job, reason: str, *, greedy: bool, fate: Fate | None = Fate.FAILED) -> Group:
    """Return a group without tokens for a job that no sampler finished. `greedy`: training groups have one more."""
    nothing = np.empty(0, np.int64), np.empty(0, bool), np.empty(0, np.float32), np.empty(0, np.int32)
    last = job.first + job.size
    rollouts = [
        Rollout(i, (), *nothing, stop_reason="failed", fate=fate, reason=reason, greedy=i == last)
        for i in range(job.first, last + (greedy and job.purpose == "train"))
    ]
    return Group(job.visit, rollouts, purpose=job.purpose)
