"""What was read from a file may hold anything: dataclasses against their annotations, states against fresh ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

PACKED_KEYS = {"dtype", "shape", "zlib"}
"""Keys of an array as a state holds it; see `packed`."""
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


def require_like(given: Any, own: Any, name: str) -> None:
    """Raises TypeError naming the first place in which `given` has not the form of `own`, the state of a fresh part.

    Keys, types of numbers and texts, lengths of lists, types and shapes of packed arrays; what `own` has as None or as
    an empty list is for the part to look at, and so is what one of them lacks.
    """
    if isinstance(own, Mapping):
        if not isinstance(given, Mapping):
            raise TypeError(f"{name} cannot be {given!r:.50}")
        if own.keys() >= PACKED_KEYS:
            if any(given.get(key) != own[key] for key in ("dtype", "shape")):
                raise TypeError(f"{name} is no array of {own['shape']} {own['dtype']}")
            return
        for key in own.keys() & given.keys():
            require_like(given[key], own[key], f"{name}.{key}")
    elif isinstance(own, list):
        if not isinstance(given, list) or (own and len(given) != len(own)):
            raise TypeError(f"{name} is no list" + (f" of {len(own)}" if own else ""))
        for i, (inner, like) in enumerate(zip(given, own, strict=False)):
            require_like(inner, like, f"{name}[{i}]")
    elif own is not None and not _is(
        given, float if type(own) is int else type(own)
    ):  # a setting may be a whole number
        raise TypeError(f"{name} cannot be {given!r:.50}")


def in_range(value: float, low: float, high: float, name: str) -> float:
    """`value`, or ValueError naming it."""
    if not low <= value <= high:
        raise ValueError(f"{name} cannot be {value!r:.50}")
    return value


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
    if hint is float:
        return (isinstance(value, float) and math.isfinite(value)) or _is(value, int)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    if not isinstance(value, origin or hint):
        return False
    if isinstance(value, Mapping) and arguments:
        return all(_is(k, arguments[0]) and _is(v, arguments[1]) for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and arguments:
        return all(_is(v, arguments[0]) for v in value)
    return True
