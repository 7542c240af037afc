"""Paths in a configuration: absolute, so that a run can be resumed from anywhere; in a run's files `~` is the home."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .redact import home

OPTIONS = ("path", "test", "games", "data", "python", "profile")
"""Options of methods that name files."""


def absolute_paths(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Values with absolute paths where these exist: `model`, `reward_funcs`, files and `file.py:Name` of `methods`."""
    # The output directory need not exist; a relative one stays what the user wrote.
    return _changed(values, methods, _absolute, output=os.path.expanduser)


def below_home(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """The same values with `~/` for the home directory, so that no file of a run says whose it was."""
    return _changed(values, methods, tilde, output=tilde)


def out_of_home(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """What `below_home` was given, where the home directory is the same; else the same file in another home."""
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
    """A name, a section, or a list of them; a name is a path only with `.py:`, as a folder may be called `uniform`."""
    if isinstance(spec, list):
        return [_of_method(each, change) for each in spec]
    if isinstance(spec, dict):
        own = {k: _each(v, change) for k, v in spec.items() if k in OPTIONS}
        return dict(spec) | own | ({"name": _of_method(spec["name"], change)} if "name" in spec else {})
    return change(spec) if isinstance(spec, str) and ".py:" in spec else spec


def _each(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_each(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _absolute(text: str) -> str:
    file, colon, name = os.path.expanduser(text).partition(":")
    return str(Path(file).resolve()) + colon + name if file and Path(file).exists() else text


def tilde(text: str) -> str:
    """A path with `~` for the home directory; any other text as it is."""
    return "~" + text[len(found) :] if (found := home()) and text.startswith(found + os.sep) else text
