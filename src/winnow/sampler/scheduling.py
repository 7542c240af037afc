"""Pace: how many groups may start now, and whether to train now.

No group starts that would be stale when it is trained: pace, don't discard.
"""

from __future__ import annotations

from ..methods.size import RolloutBatch
from .base import GroupSource
from .buffer import Buffer


class Pace:
    """What a pace of generation decides, with defaults of what only some need."""

    def __init__(self, buffer: Buffer, sampler: GroupSource) -> None:
        self._buffer, self._sampler = buffer, sampler
        self.polled: list[int] = []
        """Groups in flight, summed over the polls of each of the last steps that were collected ahead."""

    def begin_fill(self, *, ahead: bool) -> None:
        """Begin to collect a batch; `ahead`: the one after the current step's, which may reuse more groups."""
        if ahead:
            self._buffer.wanted = self._buffer.fewest  # what is more could be too much, or not trained in time

    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        """Return how many groups to start now for the optimizer step from version `step`; `steps_left` includes it.

        `zero_share`: share of groups without signal among those judged in this step; None before the first.
        """
        raise NotImplementedError

    def ready(self, step: int) -> bool:
        """Whether to train now."""
        raise NotImplementedError

    def goes_on(self) -> bool:
        """Whether to poll on although the batch is ready."""
        return False

    def count_poll(self) -> None:
        """Called before each poll."""

    def can_checkpoint(self) -> bool:
        """Whether a checkpoint may be taken now."""
        return True


class SyncPace(Pace):
    """Sampler and learner take turns: start as many groups as the batch still needs, and wait for all."""

    def __init__(self, buffer: Buffer, sampler: GroupSource, rollout_batch: RolloutBatch) -> None:
        super().__init__(buffer, sampler)
        self._rollout_batch = rollout_batch

    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        return self._rollout_batch.next(self._buffer.missing, self._sampler.pending, zero_share)

    def ready(self, step: int) -> bool:
        return not self._sampler.pending

    def can_checkpoint(self) -> bool:
        return not self._sampler.pending


class AsyncPace(Pace):
    """Groups stay in flight during updates, and are part of a checkpoint. One starts, or a batch is taken, only if
    everything in flight or waiting can then still be trained within the lag bound, a batch per step."""

    _polls = _least = 0

    def begin_fill(self, *, ahead: bool) -> None:
        super().begin_fill(ahead=ahead)
        self._polls = self._least = 0
        if ahead:
            buffer, steps = self._buffer, self._buffer.max_lag + 1
            self._least = sum(self.polled) // (steps * buffer.fewest * buffer.max_lag)
            self.polled = [*self.polled, 0][-steps:]

    def room(self, step: int, steps_left: int, zero_share: float | None) -> int:
        buffer = self._buffer
        left = buffer.wanted + (steps_left - 1) * buffer.fewest - buffer.outstanding
        return min(buffer.room(step, self._sampler.version), left)

    def ready(self, step: int) -> bool:
        return self._buffer.ready(step)

    def goes_on(self) -> bool:
        """Poll on while the update runs, so that generation is spread over the updates, although groups end in bursts.

        The least number of polls is the mean of a recent step, times the share of the allowed groups that is in flight.
        """
        return self._polls < self._least and self._sampler.pending > 0

    def count_poll(self) -> None:
        self._polls += 1
        if self.polled:
            self.polled[-1] += self._sampler.pending
