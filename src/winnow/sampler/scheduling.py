"""Pace: how many groups may start now, and whether a batch may be taken.

Nothing is sampled that would be too old when its turn comes: pace, don't discard.
"""

from __future__ import annotations

from typing import Protocol

from ..methods.size import RolloutBatch
from .base import GroupSource
from .buffer import Buffer


class Pace(Protocol):
    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        """Groups to start now, for the optimizer step from version `step`; `steps_left` counts it in.

        `zero_share`: share without signal of the groups that this step has judged; None: it has judged none.
        """
        ...

    def ready(self, step: int) -> bool:
        """Whether to train now."""
        ...

    def settled(self) -> bool:
        """Whether a checkpoint may be taken now."""
        ...


class SyncPace:
    """Sampler and learner take turns: start as many groups as the batch lacks, and wait for all."""

    def __init__(self, buffer: Buffer, sampler: GroupSource, rollout_batch: RolloutBatch) -> None:
        self._buffer, self._sampler, self._rollout_batch = buffer, sampler, rollout_batch

    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        return self._rollout_batch.next(self._buffer.missing, self._sampler.pending, zero_share)

    def ready(self, step: int) -> bool:
        return not self._sampler.pending

    def settled(self) -> bool:
        return not self._sampler.pending


class AsyncPace:
    """The sampler goes on while the learner works: a group is started, and a batch is taken, only if then everything
    in flight or waiting can still be trained within the lag bound, a batch a step."""

    def __init__(self, buffer: Buffer, sampler: GroupSource) -> None:
        self._buffer, self._sampler = buffer, sampler

    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        left = steps_left * self._buffer.prompts_per_step - self._buffer.outstanding
        return min(self._buffer.room(step, self._sampler.version), left)

    def ready(self, step: int) -> bool:
        return self._buffer.ready(step)

    def settled(self) -> bool:
        """Always: what is in flight is part of a checkpoint."""
        return True
