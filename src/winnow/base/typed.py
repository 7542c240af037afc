"""Dataclasses against their own annotations: what was read from a file may hold anything."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

LARGEST = 1 << 63
"""Whole numbers are below it: those of arrays and databases are."""


def require_types(thing: Any) -> None:
    """Raises TypeError naming the first field, also of dataclasses within, whose value is not of its type."""
    for name, hint in _hints(cast(Hashable, type(thing))):
        value = getattr(thing, name)
        if not _is(value, hint):
            raise TypeError(f"{type(thing).__name__}.{name} cannot be {value!r:.50}")
        for inner in value if isinstance(value, list | tuple) else (value,):
            if is_dataclass(inner):
                require_types(inner)


@cache
def _hints(of: Hashable) -> list[tuple[str, Any]]:
    own = cast(Any, of)
    hints = get_type_hints(own)
    return [(f.name, hints[f.name]) for f in fields(own)]


def _is(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (int, float):
        own = int if hint is int else int | float
        return isinstance(value, own) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    if not isinstance(value, origin or hint):
        return False
    if isinstance(value, Mapping) and arguments:
        return all(_is(k, arguments[0]) and _is(v, arguments[1]) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and arguments:
        return all(_is(v, arguments[0]) for v in value)
    return True
