"""Track remote samplers: their jobs, their health, and which jobs to relaunch.

A sampler that exits, or sends nothing for `timeout_s`, is replaced by one with the newest weights. Its jobs are
relaunched once, on other samplers or its successor, and fail if that one fails too; one that was not yet ready does
not count. A sampler without a place, as on a full cluster, is waited for. `handle.py` draws the stages of a sampler.

Messages over a `Channel` are plain JSON values, except what a transport puts in for `weights`:

    learner -> sampler   {"start": {...}}, {"weights": ..., "version": v, "rules": [...]}, {"launch": job},
                         {"stop": true}
    sampler -> learner   {"placed": where}, {"built": true}, {"loaded": v, "dtype": ..., "logged": {...}},
                         {"group": ...}, {"refused": why}, {"stopped": groups}; at least every second {"busy": true},
                         or {"alive": {seconds, idle_s, tokens}, "spent": {...}, "memory": {...}} since the last one

Weights go only to samplers whose engine is built: one that is still starting would hold every version until then.
"""

from __future__ import annotations

import contextlib
import queue
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..base.weights import HalvedWeights, WeightSource, transfer_s
from ..env.workers.worker import START_TIMEOUT_S
from ..methods.gate import NamedRule, rule_state
from ..rollout.evaluate import MAX_LIVE
from ..types import Group, Job
from .base import PoolOptions, Sampler, SamplerContext, SamplerRefusedError, SamplersLostError
from .codec import group_from, job_state, prompts_of
from .handle import Channel, Inbox, InFlightJob, Message, MetricsWindow, SamplerHandle, Stage, failed_group
from .weights import Transport, fingerprints

POLL_S = 0.2
"""Longest wait for a message before the samplers are checked."""
REDISPATCH_DELAY_S = 2.0
"""Seconds from a failure until jobs are sent again: samplers of one node may fail together."""
STOP_S = 10.0
"""Seconds a sampler has at the end of a run to return its unfinished groups."""


Open = Callable[[Inbox], Channel]
"""Requests a sampler, which waits for its `start` message."""


class SamplerPool(Sampler):
    """See the module's docstring. `open_channel` starts a sampler; `ended` is called after all have ended."""

    def __init__(
        self,
        options: PoolOptions,
        context: SamplerContext,
        transport: Transport,
        open_channel: Open,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.options = options
        self._prompts = prompts_of(context.task)
        self._greedy = context.greedy_baseline
        self._live = MAX_LIVE if context.task.max_turns > 1 else None
        self._device = context.device
        self._orders = {
            "config": context.settings,
            "threads": options.threads,
            "greedy_baseline": self._greedy,
            "fingerprints": fingerprints(context.task, context.tokenizer),
        }
        self._transport, self._model_bytes = transport, context.model_bytes
        self._open, self._ended = open_channel, ended
        self._rules: list[dict[str, Any]] = []
        self._inbox: Inbox = queue.SimpleQueue()
        self._members: list[SamplerHandle] = []
        self._needed = options.least
        """Samplers required to dispatch jobs: `least` at first, then one."""
        self._waiting: deque[InFlightJob] = deque()
        """Jobs launched while too few samplers had a place, or just after a failure."""
        self._dispatch_after = 0.0
        """When jobs may be sent again after a failure."""
        self._short_since: float | None = None
        self._landed: list[Group] = []
        """Groups for training, not yet polled."""
        self._pending = 0
        """Training groups launched and not yet polled; counted here, not at each poll."""
        self._logged: dict[str, list[float]] = {}
        self._reset()

    def _reset(self) -> None:
        self._since, self._waited, self._waits_told = time.monotonic(), 0.0, 0.0
        self._redispatched = 0
        for member in self._members:
            member.window = MetricsWindow()

    @property
    def _placed(self) -> list[SamplerHandle]:
        return [member for member in self._members if member.placed]

    @property
    def version(self) -> int:
        """Oldest version of the scheduled samplers; later ones start with the newest."""
        return min((member.version for member in self._placed), default=self._transport.version)

    @property
    def dtype(self) -> str:
        return next((member.dtype for member in self._members if member.ready), "unknown")

    @property
    def nodes(self) -> dict[str, str]:
        """Nodes of the samplers, by the prefix of their metrics' names."""
        return {f"sampler/{member.slot}": member.where for member in self._members if member.where}

    @property
    def pending(self) -> int:
        return self._pending

    def launch(self, job: Job) -> None:
        self._pending += job.purpose == "train"
        self._dispatch(InFlightJob(job))

    def _dispatch(self, *jobs: InFlightJob) -> None:
        """Send these and the waiting jobs to the least busy sampler; to a long silent one only if all are."""
        self._waiting += jobs
        now = time.monotonic()
        placed = self._placed
        if len(placed) < self._needed or now < self._dispatch_after:
            return
        self._needed, silent = 1, now - self.options.timeout_s / 2
        while self._waiting:
            member = min(placed, key=lambda m: (m.last_message_at < silent, not m.ready, len(m.flights)))
            sent = self._waiting.popleft()
            member.flights[sent.key] = sent
            member.channel.send({"launch": job_state(sent.job)})

    def publish(self, weights: WeightSource, rules: Sequence[NamedRule], version: int) -> None:
        for member in self._placed:
            member.window.lag = max(member.window.lag, self._transport.version - member.version)
        half = {member.dtype for member in self._members if member.ready} == {"bfloat16"}
        self._transport.write(HalvedWeights(weights) if half else weights, version)
        self._rules = [rule_state(rule) for rule in rules]
        if not self._members:
            self._members = [self._start(slot) for slot in range(self.options.samplers)]
        for member in self._placed:
            if member.stage >= Stage.BUILT:
                member.channel.send(self._weights_message())
            else:  # it starts with the newest
                member.version = version

    def _weights_message(self) -> dict[str, Any]:
        return self._transport.message() | {"rules": self._rules}

    def _start(self, slot: int) -> SamplerHandle:
        return SamplerHandle(slot, self._open(self._inbox))

    def _begin(self, member: SamplerHandle, where: str) -> None:
        """Send a scheduled sampler what it needs to build its engine."""
        member.stage, member.where, member.version = Stage.PLACED, where, self._transport.version
        device = {"device": self.options.device_of(member.slot, self._device)}
        first = {"slot": member.slot, "version": member.version, "rules": self._rules}
        member.channel.send({"start": self._orders | device | first})
        self._dispatch()

    def poll(self) -> list[Group]:
        started = time.monotonic()
        groups = self._receive(wait=not self._landed)  # may raise: what has landed is then still returned by `close`
        groups, self._landed = [*self._landed, *groups], []
        self._waited += time.monotonic() - started
        self._pending -= len(groups)
        return sorted(groups, key=lambda group: group.visit.number)

    def spent(self) -> dict[str, float]:
        told, self._waits_told = self._waits_told, self._waited
        return {"waiting": self._waited - told}

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        waiting, done, live = deque(jobs), dict[int, Group](), 0
        sizes = {job.visit.number: job.size for job in jobs}
        while len(done) < len(jobs):
            while waiting and self._has_room(live, waiting[0]):
                live += waiting[0].size
                self.launch(waiting.popleft())
            for group in self._receive(wait=True):
                if group.purpose == "train":
                    self._landed.append(group)
                else:
                    done[group.visit.number] = group
                    live -= sizes[group.visit.number]
        return [done[job.visit.number] for job in jobs]

    def _has_room(self, live: int, job: Job) -> bool:
        """Whether the environments of a job fit next to the `live` ones of other evaluation jobs."""
        return self._live is None or live == 0 or live + job.size <= self._live * len(self._placed)

    def _receive(self, *, wait: bool) -> list[Group]:
        """Return arrived groups, waiting a moment for the first, and check the samplers."""
        groups: list[Group] = []
        try:
            with contextlib.suppress(queue.Empty):
                groups += self._handle(self._inbox.get(timeout=POLL_S if wait else 0))
                while not self._inbox.empty():
                    groups += self._handle(self._inbox.get())
            self._watch(groups)
        except SamplersLostError:
            self._landed += [group for group in groups if group.purpose == "train"]
            raise
        self._dispatch()
        return groups

    def _handle(self, message: Message) -> list[Group]:
        """Return the groups that have come back with a message; messages of replaced samplers are ignored."""
        member = next((m for m in self._members if m.channel is message.channel), None)
        if member is None:
            return []
        content = message.content
        member.note_message(content)
        if content is None:
            return self._replace(member, "exited")
        if "placed" in content:
            self._begin(member, content["placed"])
        elif "built" in content:
            member.stage, member.version = Stage.BUILT, self._transport.version
            member.channel.send(self._weights_message())
        elif "loaded" in content:
            member.stage = Stage.READY
            member.version, member.dtype = content["loaded"], content["dtype"]
            for name, value in content["logged"].items():
                self._logged.setdefault(name, []).append(value)
        elif "alive" in content:
            member.window.spent.update(content["alive"])
            member.window.seconds.update(content["spent"])
            member.memory = content["memory"]
        elif "refused" in content:
            if not any(other.ready for other in self._members if other is not member):
                raise SamplerRefusedError(content["refused"])
            return self._replace(member, "refused", content["refused"])
        elif "group" in content and (key := _key(content["group"])) in member.flights:
            del member.flights[key]
            member.consecutive_failures = 0
            member.window.groups += 1
            return [group_from(content["group"], self._prompts)]
        return []

    def _watch(self, groups: list[Group]) -> None:
        """Replace samplers that are overdue; `groups` gets those that failed with them."""
        now, start_s = time.monotonic(), max(START_TIMEOUT_S, self.options.timeout_s)
        busy_s = start_s + transfer_s(max(self._transport.bytes, self._model_bytes))
        for member in self._placed:
            if how := member.overdue(self.options.timeout_s, busy_s):
                groups += self._replace(member, how)
        placed = len(self._placed)
        if placed >= self._needed:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > start_s:
            raise SamplersLostError(
                f"sync: only {placed} of {self.options.samplers} samplers could be scheduled within {start_s:g} s "
                f"({self._needed} required); {self.options.unplaced}"
            )

    def _replace(self, member: SamplerHandle, what: str, why: str = "") -> list[Group]:
        """Replace a sampler and relaunch its jobs; return the groups that failed with it.

        Raises SamplersLostError when it keeps failing, unless enough others are ready.
        """
        ended = member.channel.kill()
        how = why or ended
        last_line = how.rstrip().rpartition("\n")[2]
        place = self._members.index(member)
        if member.consecutive_failures < self.options.max_restarts:
            new = self._start(member.slot)
            new.consecutive_failures, new.window = member.consecutive_failures + 1, member.window
            new.window.restarts += 1
            self._members[place : place + 1] = [new]
            warnings.warn(f"sync: {member.name} {what} and is replaced: {last_line[-1000:]}", stacklevel=2)
        else:
            del self._members[place]
            self._give_up(member, f"{member.name} {what} ({how})")
        failed, again = [], []
        for sent in member.flights.values():
            if sent.again and member.ready:
                reason = f"two samplers that worked on it ended: {what} ({last_line[-300:]})"
                failed.append(failed_group(sent.job, reason, greedy=self._greedy))
            else:
                again.append(sent._replace(again=sent.again or member.ready))
        self._redispatched += len(again)
        self._dispatch_after = time.monotonic() + REDISPATCH_DELAY_S
        self._waiting.extendleft(reversed(again))
        self._dispatch()
        return failed

    def _give_up(self, member: SamplerHandle, how: str) -> None:
        """Continue without it, or raise SamplersLostError."""
        often = f"{how}\n{member.consecutive_failures + 1} times in a row without a finished group"
        ready = sum(other.ready for other in self._members)
        if ready < self.options.least:
            self._waiting += member.flights.values()
            raise SamplersLostError(f"{often} (max_restarts={self.options.max_restarts})")
        warnings.warn(f"sync: {often}; the run goes on with {ready} of {self.options.samplers} samplers", stacklevel=2)

    def metrics(self) -> dict[str, float]:
        """Return idle shares of wall-clock time, tokens of finished groups per second, and restarts."""
        elapsed = max(time.monotonic() - self._since, 1e-9)
        spent, seconds = Counter[str](), Counter[str]()
        for member in self._members:
            spent.update(member.window.spent)
            seconds.update(member.window.seconds)
        metrics = {
            "idle/learner": self._waited / elapsed,
            "sampler/ready": float(sum(member.ready for member in self._members)),
            "sampler/restarts": float(sum(member.window.restarts for member in self._members)),
            "sampler/redispatched": float(self._redispatched),
        }
        if spent["seconds"]:  # else no sampler has reported since
            metrics["idle/sampler"] = spent["idle_s"] / spent["seconds"]
            metrics["throughput/tokens_per_s"] = spent["tokens"] / elapsed
            seconds.update({"waiting": spent["idle_s"], "total": spent["seconds"]})
            metrics |= {f"sampler/seconds/{name}": value for name, value in seconds.items()}
        for member in self._members:
            metrics |= member.metrics()
        self._reset()
        return metrics

    def logged(self) -> dict[str, float]:
        logged, self._logged = self._logged, {}
        return {name: float(np.mean(values)) for name, values in logged.items()}

    def close(self) -> list[Group]:
        flying = [*self._waiting, *(sent for member in self._members for sent in member.flights.values())]
        try:
            groups = [*self._landed, *self._stopped()]
        finally:
            for member in self._members:
                member.channel.kill()
            self._ended()
        returned = {(group.purpose, group.visit.number) for group in groups}
        for sent in flying:
            if sent.key not in returned:  # its sampler did not answer
                groups.append(failed_group(sent.job, "", fate=None, greedy=self._greedy))
        self._members, self._landed, self._pending = [], [], 0
        self._inbox = queue.SimpleQueue()  # its messages hold on to their channels
        self._waiting.clear()
        self._transport.remove()
        return [group for group in groups if group.purpose == "train"]

    def _stopped(self) -> list[Group]:
        """Stop the samplers; return the groups they hand back, and those they had finished before.

        Waits until the samplers have exited: they close their engines and rewards.
        """
        for member in self._placed:
            member.channel.send({"stop": True})
        waiting = {id(member.channel) for member in self._placed}
        groups: list[Group] = []
        deadline = time.monotonic() + STOP_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            try:
                channel, content = self._inbox.get(timeout=left)
            except queue.Empty:
                break
            flights = next((m.flights for m in self._members if m.channel is channel), {})
            if content is None:
                waiting.discard(id(channel))
            else:
                returned = content.get("stopped", []) + ([content["group"]] if "group" in content else [])
                groups += [group_from(state, self._prompts) for state in returned if _key(state) in flights]
        return groups


def _key(state: Mapping[str, Any]) -> tuple[str, int]:
    """Return purpose and visit number of an encoded group."""
    return state["purpose"], state["visit"][0]
