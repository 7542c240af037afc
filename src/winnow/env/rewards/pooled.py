"""Reward functions that run in killable worker processes, one completion at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ...base.files import json_default
from ...base.sanitize import redact
from ..workers.functions import describe_error
from ..workers.worker import WorkerError, shared_pool
from .scores import read_score

Row = Mapping[str, Any]
"""The columns of one prompt."""
Arguments = Callable[[str, Row], dict[str, Any]]
"""Maps a completion and its row to the arguments of a function."""


class PooledReward:
    """Scores each completion in its own call, so that one that hangs fails alone.

    `target` is a `module:function`, sync or async, called in a worker with `arguments(text, row)`; it returns a number,
    None, or a dict with `score`. `columns` names the columns read by `arguments`. Called directly it has TRL's
    signature, waits, and raises WorkerError for a completion that could not be scored.
    """

    def __init__(
        self,
        name: str,
        target: str,
        arguments: Arguments,
        columns: Sequence[str] = (),
    ) -> None:
        self.__name__ = name
        self.target = target
        self.columns = tuple(columns)
        self.arguments = arguments

    def __call__(self, completions: Sequence[Any], **columns: list[Any]) -> list[float | None]:
        lists = {name: value for name, value in columns.items() if isinstance(value, list)}
        calls = arguments_each(self.arguments, completions, lists)
        futures = [shared_pool().call(self.target, arguments) for arguments in calls]
        results = [future.result() for future in futures]
        return [r["score"] if isinstance(r, dict) else r for r in results]


class FailsAlone:
    """A pooled reward function as TRL calls it: a completion that it cannot score gets None, and the others a score."""

    def __init__(self, reward: PooledReward) -> None:
        self.__name__ = reward.__name__
        self._reward = reward
        self.failed: dict[int, str] = {}
        """Completions of the latest call without a score, with the reason."""

    def __call__(self, completions: Sequence[Any], **columns: list[Any]) -> list[float | None]:
        lists = {name: value for name, value in columns.items() if isinstance(value, list)}
        self.failed = {}
        pending: list[Future[Any] | None] = []
        for i, completion in enumerate(completions):
            row = {name: values[i] for name, values in lists.items()}
            try:
                arguments = self._reward.arguments(completion_text(completion), row)
                pending.append(shared_pool().call(self._reward.target, arguments))
            except Exception as error:
                self._fail(i, error)
                pending.append(None)
        return [None if future is None else self._score(i, future) for i, future in enumerate(pending)]

    def _score(self, i: int, future: Future[Any]) -> float | None:
        try:
            score = read_score(future.result())
        except WorkerError as error:
            score = error
        if not isinstance(score, Exception):
            return score
        self._fail(i, score)
        return None

    def _fail(self, i: int, error: Exception) -> None:
        cause = error.detail if isinstance(error, WorkerError) else describe_error(error)
        self.failed[i] = redact(f"reward {self.__name__}: {cause}")


def failing_alone(reward_funcs: Any) -> Any:
    """Return TRL's `reward_funcs`, one or a list, with `FailsAlone` for pooled functions."""
    if isinstance(reward_funcs, list):
        return [failing_alone(function) for function in reward_funcs]
    return FailsAlone(reward_funcs) if isinstance(reward_funcs, PooledReward) else reward_funcs


def failures_of(reward_funcs: Sequence[Any]) -> dict[int, str]:
    """Return the completions of the latest call that some function of `failing_alone` could not score, and why."""
    failed: dict[int, str] = {}
    for function in reward_funcs:
        if isinstance(function, FailsAlone):
            failed = function.failed | failed
    return failed


def arguments_each(
    arguments: Arguments, completions: Sequence[Any], columns: Mapping[str, list[Any]]
) -> list[dict[str, Any]]:
    """Return arguments for each completion's call. Raises ValueError or TypeError for a missing or non-JSON column."""
    calls = []
    for i, completion in enumerate(completions):
        row = {name: values[i] for name, values in columns.items()}
        calls.append(arguments(completion_text(completion), row))
    return calls


def completion_text(completion: Any) -> str:
    """Return a completion as text: itself, or the assistant's last message."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def gold_text(value: Any) -> str:
    """Return a reference answer as text. Lists, objects and booleans, which data sets may have, become JSON."""
    return json.dumps(value, default=json_default) if isinstance(value, bool | list | dict) else str(value)


def verl_arguments(text: str, row: Row) -> dict[str, Any]:
    """Return the arguments that verl passes. Raises ValueError when the row has no ground truth."""
    reward_model = row.get("reward_model")
    if "ground_truth" in row:
        truth = row["ground_truth"]
    elif isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        truth = reward_model["ground_truth"]
    else:
        raise ValueError("verl's compute_score needs a column 'ground_truth' or 'reward_model' with a 'ground_truth'")
    return {
        "data_source": row.get("data_source"),
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": row.get("extra_info"),
    }
