"""Sampler in the learner's process: takes turns with the learner, on its weights or those of some steps ago.

With `overlap` they run at the same time: the loop collects a batch while it updates on the one before. With
`lag: continuous` rollouts stay in flight across updates.

Everything is a function of the seed, so a run repeats and resumes bit for bit, also with a lag; with `continuous` from
checkpoints that were due.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from safetensors.torch import load_file

from ..base.noise import noise_key
from ..base.weights import WeightSource, save_tensors
from ..engine.base import Engine, release_engine
from ..methods.gate import NamedRule
from ..rollout.evaluate import run_jobs
from ..rollout.runner import RolloutRunner
from ..types import Group, Job
from .base import Sampler, SamplerContext, SamplerRefusedError

LAG_STREAM = 8
"""Noise stream of the lag draws."""
WEIGHTS_FOLDER = "sampler-weights"


@dataclass(frozen=True)
class InProcess:
    """One process: synchronous with max_lag 0, else deterministically behind the learner."""

    lag: Literal["exact", "mixed", "continuous"] = "exact"
    """`exact`: sample with the weights of `max_lag` steps ago (of the start, in the first steps), one less where groups
    are carried, and with `overlap`. `mixed`: of 0 to as many steps ago, drawn per group, so that a batch mixes ages.
    `continuous`: with the newest; as many groups as `max_lag` allows stay in flight across updates, and their rollouts
    go on with the new weights (PipelineRL)."""
    overlap: bool = False
    """Collect the next batch while the update runs, on another core: one step off policy. It is part of `max_lag`."""

    provides: ClassVar[frozenset[str]] = frozenset({"repeatable"})

    def build(self, context: SamplerContext) -> InProcessSampler:
        assert context.runner is not None
        return InProcessSampler(context.runner, context.behind, self.lag == "mixed", context.seed)

    @property
    def continuous(self) -> bool:
        return self.lag == "continuous"


class InProcessSampler(Sampler):
    """Samples in the learner's process, up to `behind` steps behind it; keeps the weights of so many."""

    def __init__(self, runner: RolloutRunner, behind: int, mixed: bool, seed: int) -> None:
        self.runner = runner
        self.engine: Engine = runner.engine
        self.behind = behind
        self.mixed = mixed
        self._seed = seed
        self._newest = 0
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._waiting: dict[int, list[Job]] = {}
        """Jobs for other weights than the engine's, by version; the engine holds one version at a time."""
        self._landed: list[Group] = []
        """Training groups that ended before a job of another purpose could run."""
        self._failed = False

    @property
    def version(self) -> int:
        return self._newest - min(self.behind, self._newest)

    @property
    def dtype(self) -> str:
        return str(getattr(self.engine, "dtype", "unknown"))

    @property
    def pending(self) -> int:
        return len(self._landed) + self.runner.pending + sum(len(jobs) for jobs in self._waiting.values())

    def launch(self, job: Job) -> None:
        version = self._version_for(job)
        if version == self.engine.version:
            self.runner.launch(job)
        else:
            self._waiting.setdefault(version, []).append(job)

    def poll(self) -> list[Group]:
        if self._landed:
            groups, self._landed = self._landed, []
            return groups
        if self._waiting and not self.runner.pending:
            version = min(self._waiting)
            self._use(version)
            for job in self._waiting.pop(version):
                self.runner.launch(job)
        with self._noting_failure():
            return self.runner.poll()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def spent(self) -> dict[str, float]:
        return {"waiting": 0.0} | self.runner.spent()

    def run(self, jobs: Sequence[Job]) -> list[Group]:
        with self._noting_failure():
            while self.runner.pending:  # `run_jobs` has the engine to itself
                self._landed += self.runner.poll()
            used = self.engine.version
            if used == self._newest:
                return run_jobs(self.runner, jobs)
            self._use(self._newest)
            try:
                return run_jobs(self.runner, jobs)
            finally:
                self._use(used)

    def publish(self, weights: WeightSource, rules: Sequence[NamedRule], version: int) -> None:
        self._newest = version
        self.runner.set_rules(rules)
        if not self.behind:
            self.engine.load_weights(weights, version)
            return
        self._kept[version] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        self._kept = {v: kept for v, kept in self._kept.items() if v >= version - self.behind}
        self._use(self.version)

    def _version_for(self, job: Job) -> int:
        """Return the version whose weights sample the group."""
        if not self.mixed:
            return self.version
        return self._newest - noise_key(self._seed, LAG_STREAM, job.visit.number) % (self._newest - self.version + 1)

    def _use(self, version: int) -> None:
        file = f"{WEIGHTS_FOLDER}/{version}.safetensors"
        if version not in self._kept:
            raise SamplerRefusedError(f"{file}: missing from the checkpoint, but rollouts need it; restore it")
        try:
            self.engine.load_weights(self._kept[version], version)
        except ValueError as error:
            raise ValueError(f"weights of version {version} ({file}): {error}") from None

    def make_room(self) -> None:
        release_engine(self.engine)

    def save(self, directory: Path) -> None:
        for version, weights in self._kept.items():
            if version != self._newest:  # the learner saves the newest
                (directory / WEIGHTS_FOLDER).mkdir(exist_ok=True)
                save_tensors(weights, directory / WEIGHTS_FOLDER / f"{version}.safetensors")

    def load(self, directory: Path) -> None:
        files = (directory / WEIGHTS_FOLDER).glob("*.safetensors")
        self._kept = {int(file.stem): load_file(file) for file in files}

    def close(self) -> list[Group]:
        in_flight = self.runner.abandon(engine_works=not self._failed)
        groups, self._landed = [*self._landed, *([] if self._failed else in_flight)], []
        return groups
