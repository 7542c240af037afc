"""Reward functions as called for a group, and their pending answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...types import Group, Rollout
from ..workers.functions import FAILED, RewardLogs
from ..workers.worker import WorkerError
from .pooled import Arguments
from .scores import Outcome, read_score, read_scores

if TYPE_CHECKING:
    from .reward_model import RewardModel


@dataclass
class RewardFunction:
    """A reward function: a callable of this process, or the name of one called in a worker."""

    name: str
    weight: float
    parameters: dict[str, bool]
    call: Callable[..., Any] | None = None
    target: str | None = None
    arguments: Arguments | None = None
    """Arguments for each completion; None: one call a group."""
    model: RewardModel | None = None
    """Set if `call` is a reward model."""
    compares: bool | None = False
    """Whether it compares siblings; None: its author does not say."""
    quick: bool = False
    """Called at once: one of ours that cannot hang or change its arguments."""


@dataclass(eq=False)
class PendingRewards:
    """One function's answer for some rollouts of a group."""

    function: RewardFunction
    rollouts: list[Rollout]
    futures: list[Future[Any]]
    """One for each rollout, or a single one for all."""
    logs: RewardLogs

    def outcomes(self) -> list[Outcome]:
        """Return an outcome for each rollout. Takes over a worker's logs."""
        n = len(self.rollouts)
        if self.function.arguments is not None:
            return [read_score(result_of(f)) for f in self.futures]
        result = result_of(self.futures[0])
        if self.function.target is None or isinstance(result, Exception):
            return read_scores(result, n)
        self.logs.metrics, self.logs.extra = result["metrics"], result["extra"]
        value = result["value"]
        if isinstance(value, list):
            value = [
                WorkerError("raised", str(v[FAILED])) if isinstance(v, dict) and v.keys() == {FAILED} else v
                for v in value
            ]
        return read_scores(value, n)


@dataclass(eq=False)
class ScoredGroup:
    group: Group
    rollouts: list[Rollout]
    pending: list[PendingRewards]

    def unfinished(self) -> list[Future[Any]]:
        return [f for p in self.pending for f in p.futures if not f.done()]


def numbered(names: Iterable[str]) -> list[str]:
    """Return distinct names, with a number on those that repeat an earlier one: `f`, `f_2`."""
    given = list(names)
    distinct: list[str] = []
    for name in given:
        own, number = name, 1
        while own in distinct or (own != name and own in given):
            number += 1
            own = f"{name}_{number}"
        distinct.append(own)
    return distinct


def result_of(future: Future[Any]) -> Any:
    error = future.exception()
    return future.result() if error is None else error
