"""Sampler processes beside the learner's, on the same machine: both go on at once, paced by `max_lag`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .base import SamplerContext
from .options import PoolOptions
from .pipe import Pipes
from .pool import SamplerPool
from .weights import PublishedWeights

WEIGHTS = ".weights"
"""Folder of a run in which its samplers find the weights."""


@dataclass(frozen=True)
class Processes(PoolOptions):
    """Sampler processes that go on while the learner works; weights change between two of their decode steps."""

    provides: ClassVar[frozenset[str]] = frozenset({"beside", "own_engine"})

    devices: tuple[str, ...] = ()
    """Devices of the samplers in turn, e.g. [cuda:1]; empty: the run's `device`, which they share with the learner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.devices:
            if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
                raise ValueError(f"devices: expected cpu, cuda or cuda:N, not {name!r}")

    def device_of(self, slot: int, device: str) -> str | None:
        """Device of a sampler, where the run's is `device`; None is the same."""
        return self.devices[slot % len(self.devices)] if self.devices else None

    def build(self, context: SamplerContext) -> SamplerPool:
        self.check(context.config.reward_timeout_s)
        transport = PublishedWeights(Path(context.config.output_dir) / WEIGHTS)
        pipes = Pipes(self.threads, f"{context.entry}:main")
        return SamplerPool(self, context, transport, pipes, pipes.close)
