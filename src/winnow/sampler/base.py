"""Samplers run jobs with published weights and rules, beside the learner or in turn with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..base.weights import WeightSource
from ..config import RunConfig
from ..env.base import Task
from ..methods.gate import NamedRule
from ..rollout.runner import RolloutRunner
from ..types import Group, Job


class SamplersLostError(RuntimeError):
    """Samplers keep dying; the message says how."""


class SamplerRefusedError(SamplersLostError):
    """A sampler cannot do what the run asks of it; the message says why and what to do."""


@dataclass(frozen=True)
class SamplerContext:
    """Parts that a sampler is made from."""

    config: RunConfig
    task: Task
    tokenizer: Any
    greedy_baseline: bool
    """Every group in training has one more rollout, at temperature 0."""
    behind: int
    """Steps that the sampler itself may be behind the learner."""
    runner: RolloutRunner | None
    """Over the engine of the learner's process; None for samplers with engines of their own."""
    gpu: int | None = None
    """Number of the GPU that the learner uses in this process."""
    entry: str = ""
    """Module that serves a sampler in another process (`serve`, `main`); samplers may not import what builds a run."""


class SamplerOptions(Protocol):
    """Entries of the table `sync`: frozen dataclasses of options."""

    provides: ClassVar[frozenset[str]]
    """`repeatable`: a run is a function of its seed, and resumes bit for bit. `beside`: it samples while the learner
    works, so groups are in flight between steps. `own_engine`: it builds model, task and rewards by their names where
    it runs, and the learner's process needs no engine."""

    def build(self, context: SamplerContext) -> Sampler:
        """Raises ConfigError when its options do not fit the run."""
        ...


class GroupSource(Protocol):
    """Rolls groups for training out; all that a collector knows of a sampler."""

    @property
    def version(self) -> int:
        """The oldest policy version that a token of a group launched now can have."""
        ...

    @property
    def pending(self) -> int:
        """Groups launched and not yet returned by `poll`."""
        ...

    def launch(self, job: Job) -> None:
        """Start a group for training."""
        ...

    def poll(self) -> list[Group]:
        """Go on, or wait a moment; returns the groups for training that are finished and scored."""
        ...


class Sampler(GroupSource, Protocol):
    @property
    def nodes(self) -> Mapping[str, str]:
        """Where samplers are, by the first part of their metrics' names; nothing of those on this machine."""
        ...

    @property
    def dtype(self) -> str:
        """Type that engines compute with, e.g. `float32`; `unknown` when none has said."""
        ...

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        """Run jobs of another purpose to their end with the weights published last; their groups, in order."""
        ...

    def publish(self, weights: WeightSource, rules: Sequence[NamedRule], version: int) -> None:
        """New weights, and rules of the gates.

        Rollouts under way go on with them. Raises SamplerRefusedError when a rule cannot be asked there.
        """
        ...

    def make_room(self) -> None:
        """The learner is about to update: give up what memory it could use until the next `publish`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Figures since they were last asked for."""
        ...

    def save(self, directory: Path) -> None:
        """Write what a resume needs beside the learner's weights into a checkpoint."""
        ...

    def load(self, directory: Path) -> None:
        """Read it from a checkpoint; the weights of its step are published next."""
        ...

    def close(self) -> list[Group]:
        """Stop; returns what was in flight, unfinished. Safe to call twice."""
        ...
