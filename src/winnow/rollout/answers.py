"""Pending answers of overlapping environments: which ones to take now, and how long to wait for them.

An answer is due `OVERLAP` engine steps after it was asked for, and due answers are waited for together. So the rollouts
that run together, and all rounding, do not depend on the speed of an environment.

That ends for the run once no due answer arrives for `PATIENCE_S`. Agents may wait for each other (a semaphore, a pool,
a database), and the one that holds up the others may wait for the engine. From then on answers are taken as they
arrive, and the engine waits only when it has no request. The order of arrival does not choose tokens, because noise is
keyed by rollout and request; it may change the rounding of their probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from ..env.prompting import PromptError
from ..env.workers.functions import describe_error
from ..env.workers.worker import WorkerError
from .in_flight import Flight, Sibling

OVERLAP = 8
"""Tokens that a running sequence samples before an overlapping environment is waited for."""
PATIENCE_S = 1.0
"""Seconds without any answer after which answers are no longer waited for in order."""
STUCK_S = 10.0
"""Seconds without any answer, of an idle engine, after which siblings no longer wait for each other at a gate."""


@dataclass(frozen=True, eq=False)
class Awaited:
    """Pending answer of an overlapping environment: the first observation, or that to the last action."""

    flight: Flight
    sibling: Sibling
    answer: Future[Any]
    """A future of a text or None, of a `StepResult`, or of a reward or None."""
    due: int
    """Clock of the engine at which the answer is taken, or waited for."""
    independent: bool
    """Whether it never waits for another rollout (see `OverlappingEnv`)."""
    limit: str = ""
    """Stop reason of a rollout that a limit ends with this answer, its reward."""


def require_future(env: Any, answer: Any) -> None:
    """Raise TypeError if an overlapping environment returned something else."""
    if not isinstance(answer, Future):
        raise TypeError(
            f"start_reset, start_step and start_reward of {type(env).__name__} must return a Future, not "
            f"{type(answer).__name__}"
        )


class Answers:
    """The pending answers of a runner. `waits`: called every `PATIENCE_S` while one is waited for."""

    def __init__(self, waits: Callable[[], None] = lambda: None) -> None:
        self._waits = waits
        self.pending: list[Awaited] = []
        self.in_order = True
        """Whether due answers are still waited for together."""
        self.stuck = False
        """Whether nothing arrived for `STUCK_S` when the engine was last idle."""

    def take(self, clock: int) -> list[Awaited]:
        """Return the due answers that have arrived, after waiting for all of them while that is possible."""
        due = [awaited for awaited in self.pending if awaited.due <= clock]
        late = {awaited.answer for awaited in due if awaited.independent and not awaited.answer.done()}
        while late:
            _, late = wait_for(late, PATIENCE_S)
            self._waits()
        if self.in_order:
            self._wait_in_order([awaited.answer for awaited in due])
        return self._taken(due)

    def take_when_idle(self, others: Collection[Future[Any]], *, wait: bool) -> list[Awaited]:
        """Return the answers that have arrived, for an engine without requests.

        Waits for one of them, or of `others`, unless `wait` is false, but at most `STUCK_S`.
        """
        self.stuck = False
        if self.in_order or all(awaited.independent for awaited in self.pending):
            return self.take(max((awaited.due for awaited in self.pending), default=0))
        if wait:
            answers: list[Future[Any]] = [awaited.answer for awaited in self.pending]
            self.stuck, until = True, time.monotonic() + STUCK_S
            while self.stuck and (left := until - time.monotonic()) > 0:
                first = wait_for([*answers, *others], min(PATIENCE_S, left), return_when=FIRST_COMPLETED)
                self.stuck = not first.done
                self._waits()
        return self._taken(self.pending)

    def _wait_in_order(self, answers: Collection[Future[Any]]) -> None:
        late = {answer for answer in answers if not answer.done()}
        while late:
            arrived, late = wait_for(late, PATIENCE_S, return_when=FIRST_COMPLETED)
            self._waits()
            if not arrived:
                self.in_order = False
                return

    def _taken(self, due: Collection[Awaited]) -> list[Awaited]:
        taken = [awaited for awaited in due if awaited.answer.done()]
        gone = set(taken)
        self.pending = [awaited for awaited in self.pending if awaited not in gone]
        return taken


def described(error: BaseException) -> str:
    """Return the cause with file and line; messages of workers and prompt checks are already complete."""
    if isinstance(error, WorkerError):
        return error.detail
    return str(error) if isinstance(error, PromptError) else describe_error(error)
