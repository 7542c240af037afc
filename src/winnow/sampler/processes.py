"""Sampler processes on the learner's machine: both go on at once, paced by `max_lag`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import sys
import threading
from functools import partial
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from ..base.child import Child
from ..base.forkserver import Forked, forkserver
from ..config.options import CHECKED
from .base import PoolOptions, SamplerContext
from .handle import Inbox, Message
from .pool import SamplerPool
from .weights import PublishedWeights

WEIGHTS = ".weights"
"""Folder of a run in which its samplers find the weights."""


def numbered(device: str) -> str:
    """Return a device's name with its number: `auto` and `cuda` are the first GPU."""
    return "cuda:0" if device in ("auto", "cuda") else device


@dataclass(frozen=True, config=CHECKED)
class Processes(PoolOptions):
    """Sampler processes that go on while the learner works; weights change between two of their decode steps."""

    provides: ClassVar[frozenset[str]] = frozenset({"asynchronous", "own_engine"})

    devices: tuple[str, ...] = ()
    """Devices of the samplers in turn, e.g. [cuda:1]; empty: the run's `device`, which they share with the learner."""

    def __post_init__(self) -> None:
        for name in self.devices:
            if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
                raise ValueError(f"devices: expected cpu, cuda or cuda:N, not {name!r}")
        if len(self.devices) > self.samplers:
            raise ValueError(f"devices: {len(self.devices)} for {self.samplers} sampler; raise samplers")

    def device_of(self, slot: int, device: str) -> str | None:
        """Device of a sampler, where the run's is `device`; None is the same."""
        return self.devices[slot % len(self.devices)] if self.devices else None

    def places(self, device: str) -> list[str]:
        """Return the device of each sampler of a run on `device`, by its number."""
        return [numbered(self.device_of(slot, device) or device) for slot in range(self.samplers)]

    def build(self, context: SamplerContext) -> SamplerPool:
        transport = PublishedWeights(context.run_dir / WEIGHTS)
        open_channel = partial(open_pipe, threads=self.threads, entry=f"{context.entry}:main")
        return SamplerPool(self, context, transport, open_channel)


class Pipe:
    """One process, by JSON lines; its messages go into `inbox`, its end, too. It exits with this process.

    Neither side ever waits for the other to read: threads do.
    """

    def __init__(self, inbox: Inbox, process: Forked) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.process = process
        self._child = Child(process)
        self._threads = [
            threading.Thread(target=self._listen, args=(inbox,), daemon=True),
            threading.Thread(target=self._talk, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, content: dict[str, Any]) -> None:
        self._outbox.put(json.dumps(content).encode() + b"\n")

    def kill(self) -> str:
        """End it now, if it has not ended, with everything it started; returns how it ended, with its last words."""
        self._child.kill()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
        ending = self._child.ending()
        self._child.end()
        return ending

    def _listen(self, inbox: Inbox) -> None:
        if self.process.pid:  # what it imports comes first
            inbox.put(Message(self, {"placed": ""}))
        with contextlib.suppress(EOFError, ValueError):  # no JSON: what else writes to its output
            while True:
                inbox.put(Message(self, json.loads(self._child.line())))
        inbox.put(Message(self, None))

    def _talk(self) -> None:
        with contextlib.suppress(EOFError):
            while (line := self._outbox.get()) is not None:
                self._child.send(line)


def open_pipe(inbox: Inbox, threads: int, entry: str) -> Pipe:
    """Start a sampler, which runs the function `entry`; what it imports is imported once, while any of them is kept."""
    paths = dict.fromkeys([*(os.path.abspath(p) for p in sys.path), os.getcwd()])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # what imports ask of CUDA must not start it: samplers are forked
    return Pipe(inbox, forkserver(entry, env).fork())
