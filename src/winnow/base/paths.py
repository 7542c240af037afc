"""Paths in a configuration, made absolute so that a run can be resumed from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OPTIONS = ("path", "test", "games", "data", "python", "profile")
"""Options of methods that name files."""


def absolute_paths(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Values with absolute paths where these exist: `model`, `reward_funcs`, files and `file.py:Name` of `methods`."""
    result = dict(values)
    for key in ("model", "reward_funcs"):
        if result.get(key) is not None:
            result[key] = _absolute(result[key])
    return result | {key: _of_method(result[key]) for key in methods if key in result}


def _of_method(spec: Any) -> Any:
    """A name, a section, or a list of them; a name is a path only with `.py:`, as a folder may be called `uniform`."""
    if isinstance(spec, list):
        return [_of_method(each) for each in spec]
    if isinstance(spec, dict):
        return {k: _of_method(v) if k == "name" else _absolute(v) if k in OPTIONS else v for k, v in spec.items()}
    return _absolute(spec) if isinstance(spec, str) and ".py:" in spec else spec


def _absolute(text: Any) -> Any:
    if isinstance(text, list):
        return [_absolute(t) for t in text]
    file, colon, name = text.partition(":") if isinstance(text, str) else ("", "", "")
    return str(Path(file).resolve()) + colon + name if file and Path(file).exists() else text
