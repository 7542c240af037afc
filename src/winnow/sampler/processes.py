"""Sampler processes beside the learner's: both go on at once, paced by `max_lag`.

A sampler that dies, or says nothing for `timeout_s`, is replaced by one with the newest weights. What it was working on
is launched once more, and counts as failed when that one dies, too; one that had not begun to work does not count.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base.weights import StateWeights, WeightSource
from ..config import ConfigError, RunConfig
from ..env.workers.worker import START_TIMEOUT_S
from ..rollout.runner import RolloutRunner
from ..types import Fate, Group, Rollout, Visit
from .base import SamplersLostError
from .codec import group_from, visit_state
from .pipe import Child, Message, Sent
from .weights import PublishedWeights, fingerprints

WEIGHTS = ".weights"
POLL_S = 0.2
"""Longest wait for a message before the samplers are looked after."""
STOP_S = 10.0
"""What a sampler has to hand back what it was working on, at the end of a run."""


@dataclass(frozen=True)
class Processes:
    """Sampler processes that go on while the learner works; weights change between two of their decode steps."""

    samplers: int = 1
    threads: int = 1
    """Of each sampler, for matrix products."""
    timeout_s: float = 300.0
    """Silence after which a sampler is taken for stuck."""
    max_restarts: int = 3
    """Deaths of a sampler without a finished group in between, after which the run stops."""

    def __post_init__(self) -> None:
        if self.samplers < 1 or self.threads < 1 or self.max_restarts < 1:
            raise ValueError("samplers, threads and max_restarts must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, not {self.timeout_s}")

    def build(self, runner: RolloutRunner, config: RunConfig, behind: int) -> ProcessSampler:
        if self.timeout_s <= config.reward_timeout_s:
            raise ConfigError(
                f"sync: timeout_s={self.timeout_s:g} must be above reward_timeout_s={config.reward_timeout_s:g}, or a "
                "sampler that waits for a reward is taken for stuck"
            )
        return ProcessSampler(self, runner, config)


class ProcessSampler:
    overlaps = True

    def __init__(self, options: Processes, runner: RolloutRunner, config: RunConfig) -> None:
        self.options = options
        self.engine = runner.engine
        self._prompts = runner.task.train
        self._greedy = runner.options.greedy_baseline
        self._orders = {
            "config": config.model_dump(mode="json"),
            "threads": options.threads,
            "greedy_baseline": self._greedy,
            "fingerprints": fingerprints(runner.task, runner.tokenizer),
        }
        self._newest: WeightSource = StateWeights({})
        self._weights = PublishedWeights(Path(config.output_dir) / WEIGHTS)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._deaths = [0] * options.samplers
        """In a row."""
        self._failed: list[Group] = []
        """Whose sampler died twice."""
        self._reset()

    def _reset(self) -> None:
        self._since, self._waited = time.monotonic(), 0.0
        self._restarts = self._redispatched = 0
        self._logged: dict[str, list[float]] = {}
        self._before = {child.slot: child.counts for child in self._children}

    @property
    def version(self) -> int:
        return min(child.version for child in self._children)

    @property
    def pending(self) -> int:
        return sum(len(child.flights) for child in self._children) + len(self._failed)

    def launch(self, visit: Visit, size: int) -> None:
        self._send(
            min(self._children, key=lambda child: (not child.ready, len(child.flights))), Sent(visit, size, again=False)
        )

    def _send(self, child: Child, sent: Sent) -> None:
        child.flights[sent.visit.number] = sent
        child.send({"launch": visit_state(sent.visit), "size": sent.size})

    def publish(self, weights: WeightSource, version: int) -> None:
        self._newest = weights
        self._weights.write(weights, version)
        if not self._children:
            self._children = [self._start(slot) for slot in range(self.options.samplers)]
            return
        for child in self._children:
            child.send(self._told())

    def _told(self) -> dict[str, Any]:
        return {"weights": str(self._weights.path(self._weights.version)), "version": self._weights.version}

    def _start(self, slot: int) -> Child:
        return Child(slot, self._inbox, self.options.threads, self._orders | self._told())

    def poll(self) -> list[Group]:
        started = time.monotonic()
        groups, self._failed = self._failed, []
        try:
            message = self._inbox.get(timeout=0 if groups else POLL_S)
            groups += self._take(message)
            while not self._inbox.empty():
                groups += self._take(self._inbox.get())
        except queue.Empty:
            pass
        self._watch()
        self._waited += time.monotonic() - started
        return sorted(groups, key=lambda group: group.visit.number)

    def _take(self, message: Message) -> list[Group]:
        """What a sampler has to say. One that was replaced has no say any more."""
        child, content = message
        if child not in self._children:
            return []
        child.heard = time.monotonic()
        if content is None:
            self._replace(child, "died")
        elif "loaded" in content:
            child.version, child.ready = content["loaded"], True
            for name, value in content["metrics"].items():
                self._logged.setdefault(name, []).append(value)
        elif "alive" in content:
            child.counts = content["alive"]
        elif "group" in content and content["group"]["visit"][0] in child.flights:
            del child.flights[content["group"]["visit"][0]]
            self._deaths[child.slot] = 0
            return [group_from(content["group"], self._prompts)]
        return []

    def _watch(self) -> None:
        for child in list(self._children):
            limit = self.options.timeout_s if child.ready else max(START_TIMEOUT_S, self.options.timeout_s)
            if time.monotonic() - child.heard > limit:
                self._replace(child, f"said nothing for {limit:g} s and was killed")

    def _replace(self, child: Child, what: str) -> None:
        """SamplersLostError when it keeps dying."""
        how = child.kill()
        self._deaths[child.slot] += 1
        self._restarts += 1
        if self._deaths[child.slot] > self.options.max_restarts:
            self._children.remove(child)
            raise SamplersLostError(
                f"sampler {child.slot} {what} ({how})\n{self._deaths[child.slot]} times in a row without a finished "
                f"group (max_restarts={self.options.max_restarts})"
            )
        new = self._start(child.slot)
        self._children[self._children.index(child)] = new
        self._before[child.slot] = {}
        for sent in child.flights.values():
            if sent.again and child.ready:
                self._failed.append(self._failed_group(sent, f"two samplers that worked on it ended: {what}"))
            else:
                self._redispatched += 1
                self._send(new, sent._replace(again=sent.again or child.ready))

    def _failed_group(self, sent: Sent, reason: str, fate: Fate | None = Fate.FAILED) -> Group:
        nothing = np.empty(0, np.int64), np.empty(0, bool), np.empty(0, np.float32), np.empty(0, np.int32)
        rollouts = [
            Rollout(i, (), *nothing, stop_reason="failed", fate=fate, reason=reason, greedy=i == sent.size)
            for i in range(sent.size + self._greedy)
        ]
        return Group(sent.visit, rollouts)

    @contextmanager
    def newest(self) -> Iterator[None]:
        if self.engine.version != self._weights.version:
            self.engine.load_weights(self._newest, self._weights.version)
        yield

    def metrics(self) -> dict[str, float]:
        """Idle shares of wall-clock time, tokens of finished groups per second, and what befell the samplers."""
        elapsed = max(time.monotonic() - self._since, 1e-9)
        spent = [
            {key: value - self._before.get(child.slot, {}).get(key, 0.0) for key, value in child.counts.items()}
            for child in self._children
        ]
        seconds = sum(s.get("seconds", 0.0) for s in spent)
        found = {
            "idle/learner": self._waited / elapsed,
            "sampler/restarts": float(self._restarts),
            "sampler/redispatched": float(self._redispatched),
        }
        if seconds:  # else none has reported since
            found["idle/sampler"] = sum(s.get("idle_s", 0.0) for s in spent) / seconds
            found["throughput/tokens_per_s"] = sum(s.get("tokens", 0.0) for s in spent) / elapsed
        found |= {name: float(np.mean(values)) for name, values in self._logged.items()}
        self._reset()
        return found

    def save(self, directory: Path) -> None:
        """Nothing: what is in flight is the loop's, and is launched again."""

    def load(self, directory: Path) -> None: ...

    def close(self) -> list[Group]:
        flying = {child: dict(child.flights) for child in self._children}
        try:
            groups = [*self._failed, *self._stopped()]
        finally:
            for child in self._children:
                child.kill()
        there = {group.visit.number for group in groups}
        for sent in (s for flights in flying.values() for s in flights.values() if s.visit.number not in there):
            groups.append(self._failed_group(sent, "", fate=None))  # its sampler did not answer
        self._children, self._failed = [], []
        self._weights.remove()
        return groups

    def _stopped(self) -> list[Group]:
        """What the samplers hand back when they are told to stop, and what they had finished before."""
        for child in self._children:
            child.send({"stop": True})
        groups, waiting, deadline = [], set(self._children), time.monotonic() + STOP_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            try:
                child, content = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            if content is None or "stopped" in content:
                waiting.discard(child)
            found = [] if content is None else [*content.get("stopped", []), *filter(None, [content.get("group")])]
            groups += [group_from(state, self._prompts) for state in found if state["visit"][0] in child.flights]
        return groups
