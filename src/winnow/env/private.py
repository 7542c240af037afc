"""Private copies of a row's values: what one rollout or reward function changes, no other one sees.

Immutable values are passed as they are, containers are copied, and other objects are deep-copied; those that cannot be
(sockets, locks, open files, modules) are shared. An array above `LARGE_ARRAY` is read-only.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from ..types import Prompt

LARGE_ARRAY = 16 << 20
"""Bytes."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, date, datetime, time, timedelta, Decimal, frozenset)
_IMMUTABLE = frozenset(_ATOMS)


def private_prompt(prompt: Prompt) -> Prompt:
    """Return the prompt with messages, tools and columns that its receiver may change."""
    columns = {name: private(value) for name, value in prompt.columns.items()}
    return replace(prompt, messages=private(prompt.messages), tools=private(prompt.tools), columns=columns)


def private(value: Any) -> Any:
    """Return a copy of a value, which its receiver may change."""
    try:
        return _copied(value)
    except RecursionError:  # it contains itself
        return _deep(value)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    if kind in (list, tuple):
        return value[:] if _IMMUTABLE.issuperset(map(type, value)) else kind([_copied(each) for each in value])
    if kind is set:
        return value.copy()
    return _array(value) if isinstance(value, np.ndarray) and not value.dtype.hasobject else _deep(value)


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
