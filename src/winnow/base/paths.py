"""Paths in a configuration: absolute, so a run resumes from any directory, and with `~` in a run's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from .redact import home

OPTIONS = ("path", "test", "games", "data", "python", "profile")
"""Method options that name files."""


def absolute_paths(values: Mapping[str, Any], methods: Sequence[str], *, resumed: bool = False) -> dict[str, Any]:
    """Make existing paths absolute: `model`, `reward_funcs`, files, patterns and `file.py:Name` of `methods`.

    `resumed`: leave patterns and absolute paths as they are, which the run was saved with.
    """
    # The output directory need not exist; a relative one stays as written.
    return _changed(values, methods, _if_relative if resumed else _absolute_glob, output=os.path.expanduser)


def missing_paths(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, str]:
    """Return the first absolute path of each key at which nothing exists any more."""
    found: dict[str, str] = {}

    def looked_at(key: str, text: str) -> str:
        file = os.path.expanduser(text).partition(":")[0]
        if os.path.isabs(file) and not (os.path.exists(file) or glob(file, recursive=True)):
            found.setdefault(key, file)
        return text

    for key in values:
        _changed({key: values[key]}, methods, partial(looked_at, key), output=str)
    return found


def below_home(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Replace the home directory with `~`, so that a run's files do not name the user."""
    return _changed(values, methods, tilde, output=tilde)


def out_of_home(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Undo `below_home`; the paths then point into the current home directory."""
    return _changed(values, methods, os.path.expanduser, output=os.path.expanduser)


def _changed(
    values: Mapping[str, Any], methods: Sequence[str], change: Callable[[str], str], output: Callable[[str], str]
) -> dict[str, Any]:
    result = dict(values)
    for key, its in (("model", change), ("reward_funcs", change), ("output_dir", output)):
        if result.get(key) is not None:
            result[key] = _each(result[key], its)
    return result | {key: _of_method(result[key], change) for key in methods if key in result}


def _of_method(spec: Any, change: Callable[[str], str]) -> Any:
    """Change paths in a name, section or list of them. A name is a path only with `.py:`: folders can share names."""
    if isinstance(spec, list):
        return [_of_method(each, change) for each in spec]
    if isinstance(spec, dict):
        changed = dict(spec) | {key: _each(value, change) for key, value in spec.items() if key in OPTIONS}
        if "name" in spec:
            changed["name"] = _of_method(spec["name"], change)
        return changed
    return change(spec) if isinstance(spec, str) and ".py:" in spec else spec


def _each(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_each(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _absolute(text: str) -> str:
    file, colon, name = os.path.expanduser(text).partition(":")
    return str(Path(file).resolve()) + colon + name if file and Path(file).exists() else text


def _if_relative(text: str) -> str:
    return text if os.path.isabs(text) else _absolute(text)


def _absolute_glob(text: str) -> str:
    path = os.path.expanduser(text)
    return os.path.abspath(path) if has_magic(path) and glob(path, recursive=True) else _absolute(text)


def tilde(text: str) -> str:
    """Return a path with `~` for the home directory; any other text unchanged."""
    start = home()
    return "~" + text[len(start) :] if start and text.startswith(start + os.sep) else text
