"""Arguments and answers of reward functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...base.dotted import did_you_mean
from ...base.errors import ConfigError
from ...types import Group, Message, Prompt, Rollout
from ..prompting import NextMessages
from ..workers.functions import LOGGERS

Outcome = float | Exception | None
"""A reward, the cause of a missing reward, or None for "does not apply"."""


SAMPLED = ("prompts", "completions", "completion_ids", "environments")
"""Arguments, other than columns, with one entry for each rollout."""
STANDARD = (*SAMPLED, "trainer_state", *LOGGERS)
"""Arguments that are not columns."""
MAX_REWARD = 1e30
"""Larger rewards (or NaN) would overflow in statistics: a failure of the function."""


def arguments_of(group: Group, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return TRL's arguments: lists with one entry a rollout, columns repeated. The values are the prompt's own."""
    prompt, n = group.prompt, len(rollouts)
    arguments: dict[str, Any] = {name: [value] * n for name, value in prompt.columns.items()}
    arguments["prompts"] = [prompt.text if prompt.messages is None else list(prompt.messages)] * n
    arguments["completions"] = [completion_of(prompt, r) for r in rollouts]
    arguments["completion_ids"] = [r.token_ids.tolist() for r in rollouts]
    return arguments


def completion_of(prompt: Prompt, rollout: Rollout) -> str | list[Message]:
    """Return a rollout for reward functions: for a text prompt all sampled text, for messages `messages_of`."""
    if prompt.messages is not None:
        return messages_of(rollout)
    return "".join(t.action for t in rollout.turns if not t.abandoned) if rollout.turns else rollout.text


def messages_of(rollout: Rollout) -> list[Message]:
    """Return a completion as chat messages: the assistant's and, between turns, the answers to it."""
    if not rollout.turns:
        return [{"role": "assistant", "content": rollout.text}]
    messages: list[Message] = []
    last = max((i for i, turn in enumerate(rollout.turns) if not turn.abandoned), default=-1)
    for i, turn in enumerate(rollout.turns):
        if not turn.abandoned:
            messages.append(dict(turn.message or {"role": "assistant", "content": turn.action}))
        if turn.observation is not None and i < last:
            messages += _answers(turn.observation)
    return messages


def _answers(observation: str) -> list[Message]:
    """Return an observation as messages. A request with a history of its own is the prompt of a later segment."""
    if not isinstance(observation, NextMessages):
        return [{"role": "user", "content": observation}]
    return [] if observation.continues is None else [dict(m) for m in observation.messages]


def check_columns(function: str, accepted: Mapping[str, bool], columns: Collection[str]) -> None:
    """Raise ConfigError when a function cannot be called: `accepted` maps its parameters to whether each is needed."""
    missing = [name for name, needed in accepted.items() if needed and name not in STANDARD and name not in columns]
    if not {"**", *SAMPLED, *columns}.intersection(accepted):
        raise ConfigError(
            f"reward {function}: its arguments ({', '.join(accepted) or 'none'}) are neither completions nor "
            f"columns; if it makes the reward function, call it in a file, `mine = {function}(...)`, and give "
            "that by name: 'my_rewards.py:mine'"
        )
    if missing:
        has = ", ".join(sorted(columns)) or "none"
        hint = did_you_mean(missing[0], [*columns, *SAMPLED])
        hint += " (a list, one entry a rollout)" if any(f"'{name}'" in hint for name in SAMPLED) else ""
        raise ConfigError(f"reward {function} needs a column '{missing[0]}', but the data has: {has}.{hint}")


def read_scores(value: Any, n: int) -> list[Outcome]:
    """Return a function's list for n rollouts; n times the exception for anything else."""
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
    """Return one reward, or an exception for an invalid one."""
    if type(value) is float and abs(value) <= MAX_REWARD:
        return value
    if value is None or isinstance(value, Exception):
        return value
    if isinstance(value, dict) and "score" in value:  # allowed by verl
        value = value["score"]
    try:
        if getattr(value, "shape", None) in ((), (1,)):
            value = value.item()
        if not isinstance(value, bool | int | float):
            return TypeError(f"returned {_shown(value)}, not a number")
        number = float(value)
    except Exception as error:
        return error
    if not abs(number) <= MAX_REWARD:  # NaN is refused too
        return ValueError(f"returned {number}; a reward lies within +-{MAX_REWARD:g}")
    return number


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" ({value[:40]!r})" if isinstance(value, str) else "")
