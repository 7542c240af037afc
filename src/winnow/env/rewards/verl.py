"""verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` given as an object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..workers.functions import awaited
from .pooled import Row, completion_text, verl_arguments
from .scores import plain_score


def verl_group(compute_score: Callable[..., Any], completions: Sequence[Any], **arguments: Any) -> list[Any]:
    """Scores of a group; a completion on which the function raises fails alone."""
    scores: list[Any] = []
    for call in _calls(compute_score, completions, arguments):
        try:
            scores.append(plain_score(awaited(call())))
        except Exception as error:
            scores.append(error)
    return scores


async def verl_group_async(
    compute_score: Callable[..., Any], completions: Sequence[Any], **arguments: Any
) -> list[Any]:
    """The same for an async function, whose calls run side by side."""

    async def score(call: Callable[[], Any]) -> Any:
        try:
            return plain_score(await call())
        except Exception as error:
            return error

    return list(await asyncio.gather(*(score(call) for call in _calls(compute_score, completions, arguments))))


def _calls(
    compute_score: Callable[..., Any], completions: Sequence[Any], arguments: Mapping[str, Any]
) -> list[Callable[[], Any]]:
    """Calls of the function, one for each completion."""
    calls: list[Callable[[], Any]] = []
    for i, completion in enumerate(completions):
        row = {name: values[i] for name, values in arguments.items() if isinstance(values, list)}
        calls.append(partial(_call, compute_score, completion_text(completion), row))
    return calls


def _call(compute_score: Callable[..., Any], text: str, row: Row) -> Any:
    return compute_score(**verl_arguments(text, row))
