"""Interfaces of samplers, which run jobs with published weights and gate rules; the heartbeat of those elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ..base.weights import WeightSource
from ..config.options import CHECKED
from ..env.base import Task
from ..methods.gate import NamedRule
from ..rollout.runner import RolloutRunner
from ..types import Group, Job


class JobQueue:
    """Sampler whose jobs are all run at the next poll, by `run`."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    @property
    def pending(self) -> int:
        return len(self._jobs)

    def launch(self, job: Job) -> None:
        self._jobs.append(job)

    def poll(self) -> list[Group]:
        jobs, self._jobs = self._jobs, []
        return self.run(jobs)

    def spent(self) -> dict[str, float]:
        return {}

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        """Return the finished groups of jobs, in order."""
        raise NotImplementedError


class SamplersLostError(RuntimeError):
    """Samplers keep failing; the message says how."""


class SamplerRefusedError(SamplersLostError):
    """A sampler cannot run this configuration; the message says why and what to do."""


@dataclass(frozen=True)
class SamplerContext:
    """Parts a sampler is built from."""

    settings: Mapping[str, Any]
    """The run's configuration as JSON values, from which samplers in other processes build everything."""
    run_dir: Path
    task: Task
    tokenizer: Any
    greedy_baseline: bool
    """Every training group has one more rollout, at temperature 0."""
    behind: int
    """Steps that the weights of a sampler in this process are older than the learner's."""
    runner: RolloutRunner | None
    """Over the engine of the learner's process; None for samplers with their own engines."""
    seed: int = 0
    device: str = "auto"
    engine: Any = None
    """Options of the engine for this run."""
    reward_env: Sequence[str] = ()
    """Environment variables that rewards may see."""
    cores: int = 1
    """CPUs that the run asks of a cluster."""
    model_bytes: int = 0
    """Of the whole model in float32, which each sampler loads, whatever is published to it."""
    gpu: int | None = None
    """Number of the GPU that the learner uses in this process."""
    entry: str = ""
    """Module that serves a sampler in another process (`serve`, `main`); samplers may not import what builds a run."""


class SamplerOptions(Protocol):
    """Options in the table `sync`: frozen dataclasses."""

    provides: ClassVar[frozenset[str]]
    """`repeatable`: a run is a function of its seed, and resumes bit for bit. `asynchronous`: samples during updates,
    so groups are in flight between steps. `own_engine`: builds model, task and rewards by name where it runs; the
    learner's process needs no engine."""

    def build(self, context: SamplerContext) -> Sampler:
        """Build the sampler. Raises ConfigError when its options do not fit the run."""
        ...


@pydantic_dataclass(frozen=True, config=CHECKED)
class PoolOptions:
    """Base class of the options of samplers in other processes."""

    unplaced: ClassVar[str] = "their imports take longer on this machine; raise timeout_s"
    """Remedy where samplers have no place in time."""

    samplers: PositiveInt = 1
    threads: PositiveInt = 1
    """Threads of each sampler, for matrix products."""
    timeout_s: PositiveFloat = 300.0
    """Silence after which a sampler counts as stuck."""
    max_restarts: PositiveInt = 3
    """Restarts in a row of a sampler, without a finished group in between; the next failure stops the run."""

    @property
    def least(self) -> int:
        """Samplers that must be scheduled before work begins."""
        return self.samplers

    def device_of(self, slot: int, device: str) -> str | None:
        """Return the device of a sampler in a run on `device`; None: the same."""
        return None

    def engine_of(self, slot: int) -> Any:
        """Return the options of a sampler's engine, where they come with the sampler; None: the run's engine."""
        return None


class GroupSource(Protocol):
    """Source of training groups: all a collector knows of a sampler."""

    @property
    def version(self) -> int:
        """Oldest policy version that a token of a group launched now can have."""
        ...

    @property
    def pending(self) -> int:
        """Groups launched and not yet returned by `poll`."""
        ...

    def launch(self, job: Job) -> None:
        """Start a group for training."""
        ...

    def poll(self) -> list[Group]:
        """Continue, or wait a moment; return the training groups that are finished and scored."""
        ...

    def spent(self) -> dict[str, float]:
        """Return the seconds of `poll` and of evaluations since the last call, by what they were spent on."""
        return {}


class Sampler(GroupSource, Protocol):
    """Runs jobs with published weights. Samplers derive from it; what has a default is optional."""

    @property
    def nodes(self) -> Mapping[str, str]:
        """Nodes of samplers on other machines, by the prefix of their metrics' names."""
        return {}

    @property
    def dtype(self) -> str:
        """Compute type of the engines, e.g. `float32`; `unknown` before the first report."""
        ...

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        """Run jobs of other purposes to their end with the newest weights; return their groups in order."""
        ...

    def publish(self, weights: WeightSource, rules: Sequence[NamedRule], version: int) -> None:
        """Load new weights and gate rules.

        Running rollouts continue with them. Raises SamplerRefusedError when a rule cannot be used there.
        """
        ...

    def make_room(self) -> None:
        """Free memory that the learner's update can use, until the next `publish`."""
        return

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}

    def logged(self) -> dict[str, float]:
        """Return means of what rewards have logged in other processes since the last call."""
        return {}

    def save(self, directory: Path) -> None:
        """Write what a resume needs besides the learner's weights and what is in flight into a checkpoint."""
        return

    def load(self, directory: Path) -> None:
        """Restore from a checkpoint; the weights of its step are published next."""
        return

    def close(self) -> list[Group]:
        """Stop; return the unfinished groups in flight. Safe to call twice."""
        ...


HEARTBEAT_S = 1.0


@contextmanager
def busy(reply: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Report `busy` from a thread while the body starts an engine or loads weights; the body must not reply itself."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            reply({"busy": True})

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
