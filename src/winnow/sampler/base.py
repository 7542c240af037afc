"""What a sampler is: it rolls out visits with published weights, beside the learner or in turn with it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ..base.weights import WeightSource
from ..types import Group, Visit


class SamplersLostError(RuntimeError):
    """Samplers keep dying; the message says how."""


class Sampler(Protocol):
    overlaps: bool
    """Whether it goes on while the learner works: then groups are in flight between steps, paced by the buffer."""

    @property
    def version(self) -> int:
        """The oldest policy version that a token of a group launched now can have."""
        ...

    @property
    def pending(self) -> int:
        """Groups launched and not yet returned."""
        ...

    def launch(self, visit: Visit, size: int) -> None:
        """Start `size` siblings of a visit."""
        ...

    def poll(self) -> list[Group]:
        """Go on, or wait a moment; returns the groups that are finished and scored."""
        ...

    def publish(self, weights: WeightSource, version: int) -> None:
        """New weights; rollouts under way go on with them."""
        ...

    def newest(self) -> AbstractContextManager[None]:
        """While it lasts, the engine of this process has the weights published last: for evaluations."""
        ...

    def metrics(self) -> dict[str, float]:
        """Since they were last asked for."""
        ...

    def save(self, directory: Path) -> None:
        """Write what a resume needs beside the learner's weights into a checkpoint."""
        ...

    def load(self, directory: Path) -> None:
        """From a checkpoint; the weights of its step are published next."""
        ...

    def close(self) -> list[Group]:
        """Stop; returns what was in flight, unfinished. Safe to call twice."""
        ...
