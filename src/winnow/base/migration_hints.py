"""Replacements for keys and rewards of other trainers (TRL, verl, prime-rl); the keys are in a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")
REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
REWARD_FACTORIES = ("get_soft_overlong_punishment", "get_cosine_scaled_reward", "get_repetition_penalty_reward")
"""Names in `trl.rewards` that TRL's scripts accept without a module."""


@cache
def load_hints(section: str) -> dict[str, str]:
    """Return the hint for each key of the section `flat`, or for each pattern of `nested` in order."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))[section]
    return {key: entry["hint"] for entry in entries for key in entry["keys"].split()}


def key_hints(key: str, value: Any) -> Iterator[tuple[str, str | None]]:
    """Yield each unknown key under `key`, dotted, and its hint; None if no other trainer has the key."""
    flat = load_hints("flat")
    if isinstance(value, dict) and value and key not in flat:
        for name, inner in value.items():
            yield from key_hints(f"{key}.{name}", inner)
        return
    patterns = load_hints("nested")
    matching = (hint for pattern, hint in patterns.items() if fnmatchcase(key, pattern))
    yield key, flat.get(key) or next(matching, None)


def reward_hint(target: str, own: Iterable[str]) -> str:
    """Return e.g. ` Did you mean 'trl.rewards:think_format_reward'?` for a reward of TRL's scripts, or empty text.

    `own`: plain names known here.
    """
    module, _, name = target.rpartition(".")
    if name in REWARD_FACTORIES:
        return (
            f" trl.rewards:{name} makes a reward function: call it in a file of your own, `made = {name}(...)`, and "
            "name that, 'my_rewards.py:made'."
        )
    if name == "py":
        return f" Name a function of the file: '{target}:function'."
    if module:
        return f" Did you mean '{module}:{name}'?"
    close = get_close_matches(target, (*own, *REWARDS), n=1, cutoff=0.6)
    if not close:
        return ""
    return f" Did you mean '{f'trl.rewards:{close[0]}' if close[0] in REWARDS else close[0]}'?"
