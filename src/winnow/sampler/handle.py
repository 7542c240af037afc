"""One sampler elsewhere as the learner knows it: the way to it, what it works on, what it has done."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..types import Fate, Group, Job, Rollout


class Channel(Protocol):
    """The way to one sampler: what it says goes into the inbox that it was opened with, its end as None.

    `{"placed": where}` comes first, as soon as the sampler has a place to run. It is told nothing before.
    """

    def send(self, content: dict[str, Any]) -> None:
        """Never waits for the other side to read."""
        ...

    def kill(self) -> str:
        """End the sampler now, if it has not ended, with everything it started: how it ended and what it said last."""
        ...


class Message(NamedTuple):
    channel: Channel
    content: dict[str, Any] | None
    """None: it has closed its output, for good."""


Inbox = queue.SimpleQueue[Message]


class InFlightJob(NamedTuple):
    """A job that samplers work on."""

    job: Job
    again: bool = False
    """Whether it was launched before, on a sampler that died."""

    @property
    def key(self) -> tuple[str, int]:
        return self.job.purpose, self.job.visit.number


@dataclass
class MetricsWindow:
    """What happened to the sampler of a slot, and to those it replaced, since figures were last asked for."""

    counts: dict[str, float] = field(default_factory=dict)
    """Counts of the sampler at the beginning."""
    restarts: int = 0
    groups: int = 0
    lag: int = 0
    """Versions that its weights were behind the newest when the next ones came, at most."""


@dataclass(eq=False)
class SamplerHandle:
    """One sampler. It waits for a place, then loads weights, then it is `ready`."""

    slot: int
    channel: Channel
    where: str | None = None
    """Its node, or "" for this machine; None while it waits for a place."""
    version: int = -1
    """Policy version of the weights that it is known to have, or will begin with."""
    dtype: str = "unknown"
    """Type that its engine computes with."""
    built: bool = False
    """Its engine is built, and it is sent weights."""
    ready: bool = False
    deaths: int = 0
    """Deaths in a row of the samplers of this slot, without a finished group in between."""
    flights: dict[tuple[str, int], InFlightJob] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    """Seconds, seconds idle and tokens sampled since its start, MiB of memory that it holds, peak GiB of its GPU."""
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    """When it last sent anything but `busy`."""
    spell: MetricsWindow = field(default_factory=MetricsWindow)

    def hear(self, content: Mapping[str, Any] | None) -> None:
        """A message has arrived."""
        self.heard = time.monotonic()
        if content is None or "busy" not in content:
            self.moved = self.heard

    def overdue(self, timeout_s: float, busy_s: float) -> str:
        """How it exceeds its time limits: silent for `timeout_s`, or in one call for `busy_s`; empty if it does not."""
        now = time.monotonic()
        if now - self.heard > timeout_s:
            return f"said nothing for {timeout_s:g} s and was killed"
        if now - self.moved > busy_s:
            return f"was busy starting or loading weights for {busy_s:g} s and was killed"
        return ""

    @property
    def name(self) -> str:
        return f"sampler {self.slot}" + (f" on {self.where}" if self.where else "")

    @property
    def spent(self) -> dict[str, float]:
        """Seconds, seconds idle and tokens of this spell; nothing when it has not reported."""
        if self.counts.get("seconds", 0.0) <= self.spell.counts.get("seconds", 0.0):
            return {}
        return {key: self.counts[key] - self.spell.counts.get(key, 0.0) for key in ("seconds", "idle_s", "tokens")}

    def metrics(self) -> dict[str, float]:
        """Figures of this spell. Tokens are those of finished groups."""
        found = {"restarts": float(self.spell.restarts), "groups": float(self.spell.groups)}
        if self.where is not None:
            found["lag"] = float(self.spell.lag)
        if spent := self.spent:
            found["idle"] = spent["idle_s"] / spent["seconds"]
            found["tokens_per_s"] = spent["tokens"] / spent["seconds"]
        found |= {name: self.counts[name] for name in ("memory_mib", "gpu_memory_gib") if name in self.counts}
        return {f"sampler/{self.slot}/{name}": value for name, value in found.items()}

    def begin_spell(self) -> None:
        self.spell = MetricsWindow(self.counts)


def failed_group(job: Job, reason: str, *, greedy: bool, fate: Fate | None = Fate.FAILED) -> Group:
    """Rollouts without tokens for a job that no sampler has finished. `greedy`: training groups have one more."""
    nothing = np.empty(0, np.int64), np.empty(0, bool), np.empty(0, np.float32), np.empty(0, np.int32)
    size = job.size + (greedy and job.purpose == "train")
    rollouts = [
        Rollout(i, (), *nothing, stop_reason="failed", fate=fate, reason=reason, greedy=i == job.size)
        for i in range(size)
    ]
    return Group(job.visit, rollouts, purpose=job.purpose)
