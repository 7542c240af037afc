"""Paths in a configuration: absolute, so that a run resumes from any directory, and with `~` in a run's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from glob import glob, has_magic
from typing import Any

from ..base.sanitize import home
from . import METHODS, RunConfig

OPTIONS = ("path", "test", "games", "data", "python", "profile")
"""Method options that name files."""
REWARDS = {
    "countdown": "winnow.tasks.countdown:countdown_reward",
    "math": "winnow.env.rewards.math:math_reward",
    "exact": "winnow.env.rewards.simple:exact_answer",
}
"""Plain name -> reward function; also where a folder has the same name."""


def absolute_paths(values: Mapping[str, Any], *, resumed: bool = False) -> dict[str, Any]:
    """Make existing paths absolute: `model`, `reward_funcs`, files, patterns and `file.py:Name` of methods.

    `resumed`: leave patterns and absolute paths as they are, which the run was saved with.
    """
    # The output directory need not exist; a relative one stays as written.
    return _changed(values, _if_relative if resumed else _absolute_glob, output=os.path.expanduser)


def missing_paths(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the first absolute path of each key at which nothing exists any more."""
    found: dict[str, str] = {}

    def looked_at(key: str, text: str) -> str:
        file = os.path.expanduser(text).partition(":")[0]
        if os.path.isabs(file) and not (os.path.exists(file) or glob(file, recursive=True)):
            found.setdefault(key, file)
        return text

    for key in values:
        _changed({key: values[key]}, partial(looked_at, key), output=str)
    return found


def as_saved(config: RunConfig) -> dict[str, Any]:
    """Return JSON values for a run's files and trackers, with `~` for the home directory, so that they do not name the
    user; `from_saved` undoes it."""
    return _changed(config.model_dump(mode="json"), tilde, output=tilde)


def from_saved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved values with paths into the current home directory."""
    return _changed(values, os.path.expanduser, output=os.path.expanduser)


def _changed(values: Mapping[str, Any], change: Callable[[str], str], output: Callable[[str], str]) -> dict[str, Any]:
    result = dict(values)

    def reward(text: str) -> str:
        return text if text in REWARDS else change(text)

    for key, its in (("model", change), ("reward_funcs", reward), ("output_dir", output)):
        if result.get(key) is not None:
            result[key] = on_texts(result[key], its)
    teacher = result.get("teacher")
    if isinstance(teacher, Mapping) and not teacher.get("url"):  # of a server it is a name
        result["teacher"] = {**teacher, "model": on_texts(teacher.get("model"), change)}
    elif teacher is not None:
        result["teacher"] = on_texts(teacher, change)
    return result | {key: _of_method(result[key], change) for key in METHODS if key in result}


def _of_method(spec: Any, change: Callable[[str], str]) -> Any:
    """Change paths in a name, section or list of them. A name is a path only with `.py:`: folders can share names."""
    if isinstance(spec, list):
        return [_of_method(each, change) for each in spec]
    if isinstance(spec, dict):
        changed = dict(spec) | {key: on_texts(value, change) for key, value in spec.items() if key in OPTIONS}
        for key in spec.keys() & {"name", "agent"}:
            changed[key] = _of_method(spec[key], change)
        return changed
    return change(spec) if isinstance(spec, str) and ".py:" in spec else spec


def on_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change a text, or the texts of a list; other values stay."""
    if isinstance(value, list):
        return [on_texts(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


def _absolute(text: str) -> str:
    """Return the path that exists, absolute; links keep their names. `package:function` names no file."""
    file, colon, name = os.path.expanduser(text).partition(":")
    if not file or not os.path.exists(file) or (colon and not file.endswith(".py")):
        return text
    return os.path.abspath(file) + colon + name


def _if_relative(text: str) -> str:
    return text if os.path.isabs(text) else _absolute(text)


def _absolute_glob(text: str) -> str:
    path = os.path.expanduser(text)
    return os.path.abspath(path) if has_magic(path) and glob(path, recursive=True) else _absolute(text)


def tilde(text: str) -> str:
    """Return a path with `~` for the home directory; any other text unchanged."""
    start = home()
    return "~" + text[len(start) :] if start and text.startswith(start + os.sep) else text
