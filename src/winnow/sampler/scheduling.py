"""Pace: how many groups may start now, and whether to train now.

No group starts that would be stale when it is trained: pace, don't discard.
"""

from __future__ import annotations

from ..methods.size import RolloutBatch
from .base import GroupSource
from .buffer import Buffer


class SyncPace:
    """Sampler and learner take turns: start as many groups as the batch still needs, and wait for all."""

    def __init__(self, buffer: Buffer, sampler: GroupSource, rollout_batch: RolloutBatch) -> None:
        self._buffer, self._sampler, self._rollout_batch = buffer, sampler, rollout_batch

    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        """Return how many groups to start now for the optimizer step from version `step`; `steps_left` includes it.

        `zero_share`: share of groups without signal among those judged in this step; None before the first.
        """
        return self._rollout_batch.next(self._buffer.missing, self._sampler.pending, zero_share)

    def ready(self, step: int) -> bool:
        """Whether to train now."""
        return not self._sampler.pending

    def next_wanted(self) -> int:
        """Return how many new groups to collect for the batch after the current one, before it is known."""
        return self._buffer.wanted

    def can_checkpoint(self) -> bool:
        """Whether a checkpoint may be taken now."""
        return not self._sampler.pending


class AsyncPace:
    """The sampler continues during updates. A group starts, or a batch is taken, only if everything in flight or
    waiting can then still be trained within the lag bound, a batch per step."""

    def __init__(self, buffer: Buffer, sampler: GroupSource) -> None:
        self._buffer, self._sampler = buffer, sampler

    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        buffer = self._buffer
        left = buffer.wanted + (steps_left - 1) * buffer.fewest - buffer.outstanding
        return min(buffer.room(step, self._sampler.version), left)

    def ready(self, step: int) -> bool:
        return self._buffer.ready(step)

    def next_wanted(self) -> int:
        """The fewest: with more, some could not be trained in time."""
        return self._buffer.fewest

    def can_checkpoint(self) -> bool:
        """Always true: what is in flight is part of a checkpoint."""
        return True


Pace = SyncPace | AsyncPace
