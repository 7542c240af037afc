"""Arguments and answers of reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...types import Group, Rollout
from ..prompting import NextMessages

Outcome = float | Exception | None
"""A reward, the cause why there is none, or None for "does not apply"."""


LARGEST = 1e30
"""Rewards beyond it (or NaN) would overflow in statistics: a failure of the function."""


def arguments_of(group: Group, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """TRL's arguments: lists with one entry a rollout, columns repeated."""
    prompt, n = group.prompt, len(rollouts)
    arguments: dict[str, Any] = {name: [value] * n for name, value in prompt.columns.items()}
    if prompt.messages is None:
        arguments["prompts"] = [prompt.text] * n
        arguments["completions"] = [r.text for r in rollouts]
    else:
        arguments["prompts"] = [[dict(m) for m in prompt.messages] for _ in rollouts]
        arguments["completions"] = [messages_of(r) for r in rollouts]
    arguments["completion_ids"] = [r.token_ids.tolist() for r in rollouts]
    return arguments


def messages_of(rollout: Rollout) -> list[dict[str, Any]]:
    """A completion as chat messages: what the assistant said and, between turns, what it was answered."""
    if len(rollout.turns) <= 1:
        return [{"role": "assistant", "content": rollout.text}]
    messages = []
    for i, turn in enumerate(rollout.turns):
        messages.append({"role": "assistant", "content": turn.action})
        if turn.observation is not None and i < len(rollout.turns) - 1:
            tools = turn.observation.messages if isinstance(turn.observation, NextMessages) else ()
            messages += [dict(m) for m in tools] or [{"role": "user", "content": turn.observation}]
    return messages


def plain_score(value: Any) -> Any:
    """verl allows `{"score": x, ...}` for x."""
    return value["score"] if isinstance(value, dict) and "score" in value else value


def read_scores(value: Any, n: int) -> list[Outcome]:
    """A function's list for n rollouts; n times the exception when it is not such a list."""
    if isinstance(value, Exception):
        return [value] * n
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [TypeError(f"returned {_shown(value)}, not a list of {n} numbers")] * n
    if len(value) != n:
        return [ValueError(f"returned {len(value)} rewards for {n} completions")] * n
    return [read_score(v) for v in value]


def read_score(value: Any) -> Outcome:
    """One reward; an exception for what is none."""
    if value is None or isinstance(value, Exception):
        return value
    value = plain_score(value)
    try:
        if getattr(value, "shape", None) in ((), (1,)):
            value = value.item()
        if not isinstance(value, bool | int | float):
            return TypeError(f"returned {_shown(value)}, not a number")
        number = float(value)
    except Exception as error:
        return error
    return number if abs(number) <= LARGEST else ValueError(f"returned {number}; a reward lies within +-{LARGEST:g}")


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" ({value[:40]!r})" if isinstance(value, str) else "")
