"""Private copies of a row's values: what one rollout or reward function changes, no other one sees.

Immutable values are passed as they are and small containers are copied at once. A large list or dict copies its
contents when it is first used, so a column that nobody reads costs one shallow copy. Other objects are deep-copied;
those that cannot be (sockets, locks, open files, modules) are shared. An array above `LARGE_ARRAY` is read-only.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
from yaml.representer import Representer, SafeRepresenter

from ..types import Prompt

AT_ONCE = 200
"""Most values of a container that is copied at once."""
LARGE_ARRAY = 16 << 20
"""Bytes."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, date, datetime, time, timedelta, Decimal, frozenset)
_IMMUTABLE = frozenset(_ATOMS)
_copying = threading.RLock()


class _LargeError(Exception):
    """More than `AT_ONCE` values."""


def private_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt with messages, tools and columns that its receiver may change."""
    columns = {name: private(value) for name, value in prompt.columns.items()}
    return replace(prompt, messages=private(prompt.messages), tools=private(prompt.tools), columns=columns)


def private(value: Any) -> Any:
    """Return a copy of a value; of a large list or dict one that copies its contents at the first use."""
    if type(value) in _IMMUTABLE:
        return value
    try:
        return _copied(value, [AT_ONCE])
    except _LargeError:
        if type(value) is list:
            return LazyList(value)
        return LazyDict(value) if type(value) is dict else _whole(value)


def _whole(value: Any) -> Any:
    try:
        return _copied(value, [float("inf")])
    except RecursionError:  # it contains itself
        return _deep(value)


def _copied(value: Any, left: list[float]) -> Any:
    """Return a copy, and count its values down. Raises _LargeError when none is left."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind not in (list, tuple, dict, set):
        return _array(value) if isinstance(value, np.ndarray) and not value.dtype.hasobject else _deep(value)
    left[0] -= len(value)
    if left[0] < 0:
        raise _LargeError
    if kind is dict:
        return {key: _copied(each, left) for key, each in value.items()}
    if kind is set:
        return value.copy()
    if _IMMUTABLE.issuperset(map(type, value)):
        return value[:]
    return kind([_copied(each, left) for each in value])


def _deep(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # any error of an object's own copying: it is shared
        return value


def _array(array: np.ndarray) -> np.ndarray:
    if array.nbytes <= LARGE_ARRAY:
        return array.copy()
    frozen = array.view()
    frozen.flags.writeable = False
    return frozen


class LazyList(list[Any]):
    """A list that copies its contents at the first use. Pickled or written as YAML or JSON, it is a plain list."""

    __slots__ = ("source",)

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self.source: list[Any] | None = values

    def own(self) -> None:
        """Copy what it holds now: C code such as `heapq` may have changed it without a method call."""
        with _copying:
            if self.source is not None:
                super().__setitem__(slice(None), _whole(super().__getitem__(slice(None))))
                self.source = None

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


class LazyDict(dict[Any, Any]):
    """A dict that copies its values at the first use. Pickled or written as YAML or JSON, it is a plain dict."""

    __slots__ = ("source",)

    def __init__(self, values: dict[Any, Any]) -> None:
        super().__init__(values)
        self.source: dict[Any, Any] | None = values

    def own(self) -> None:
        with _copying:
            if self.source is not None:
                super().update(_whole(dict(zip(super().keys(), super().values(), strict=True))))
                self.source = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def _owning(usual: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.source is not None:
            self.own()
        return usual(self, *args, **kwargs)

    return method


_LIST = "__getitem__ __setitem__ __delitem__ __iter__ __reversed__ __add__ __iadd__ __mul__ __rmul__ __imul__ append"
_LIST += " clear copy extend insert pop remove reverse sort"
_DICT = "__getitem__ __setitem__ __delitem__ __iter__ __or__ __ror__ __ior__ clear copy get items pop popitem"
_DICT += " setdefault update values"
for _name in _LIST.split():
    setattr(LazyList, _name, _owning(getattr(list, _name)))
for _name in _DICT.split():
    setattr(LazyDict, _name, _owning(getattr(dict, _name)))
for _representer in (SafeRepresenter, Representer):  # in YAML, too, they are plain
    _representer.add_representer(LazyList, SafeRepresenter.represent_list)
    _representer.add_representer(LazyDict, SafeRepresenter.represent_dict)
