"""Functions by name: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...base.dotted import TargetError, load

VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth")
MAX_ERROR = 2_000
MAX_REPLY = 4 << 20
"""Longest reply of a worker in bytes."""
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def load_function(target: str) -> Callable[..., Any]:
    """Import the function named by `target`. Raises TargetError, or any error the module raises when imported."""
    function: Callable[..., Any] = load(target)
    if not callable(function):
        name = target.rpartition(":")[2]
        raise TargetError(f"'{target}': '{name}' is a {type(function).__name__}, not a function")
    return function


def parameters_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the names of a function's parameters -> whether each is required; `**` means any keyword."""
    required = {}
    for name, p in inspect.signature(function).parameters.items():
        if p.kind is p.VAR_KEYWORD:
            required["**"] = False
        elif p.kind is p.POSITIONAL_ONLY:
            raise TargetError(f"{function_name(function)}: argument '{name}' cannot be given by name")
        elif p.kind is not p.VAR_POSITIONAL:
            required[name] = p.default is p.empty
    return required


def compares_siblings(function: Any) -> bool | None:
    """Return the mark `compares_siblings` of a reward function; None without one."""
    while isinstance(function, partial):
        function = function.func
    mark = getattr(function, "compares_siblings", False if is_own(function) else None)
    if not isinstance(mark, bool | None):
        raise TargetError(f"reward {function_name(function)}: compares_siblings must be True or False ({mark!r})")
    return mark


def is_own(function: Any) -> bool:
    """Return whether Winnow defines a function, not its user."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def function_name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def inspect_function(target: str) -> dict[str, Any]:
    """Return `{name, parameters, compares}` of a function by name, which a parent asks before it trusts a target."""
    function = load_function(target)
    known = {"name": function_name(function), "parameters": parameters_of(function)}
    return known | {"compares": compares_siblings(function)}


FAILED = "winnow_failed"
"""Key under which a worker passes on that a value of a list is an exception."""


def call_function(target: str, kwargs: dict[str, Any], n: int, loggers: Sequence[str] = ()) -> dict[str, Any]:
    """Call a function by name for `n` rollouts in this process; return `{value, metrics, extra}`, with its logs."""
    logs = RewardLogs(n)
    if kwargs.get("trainer_state") is not None:
        kwargs = kwargs | {"trainer_state": SimpleNamespace(**kwargs["trainer_state"])}
    kwargs = kwargs | {name: getattr(logs, name) for name in loggers}
    value = awaited(load_function(target)(**kwargs))
    if isinstance(value, list | tuple):
        value = [{FAILED: describe_error(v)} if isinstance(v, Exception) else v for v in value]
    return {"value": value, "metrics": logs.metrics, "extra": logs.extra}


class RewardLogs:
    """Logs of one call of a reward function for `n` rollouts. Its methods are the arguments that TRL passes."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.metrics: list[tuple[str, float]] = []
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((str(name), float(value)))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Record a value for each completion. Raises ValueError if their numbers differ."""
        values = list(values)
        if len(values) != self._n:
            raise ValueError(f"log_extra: column '{column}' has {len(values)} values for {self._n} completions")
        self.extra[str(column)] = [_loggable(value) for value in values]


LOGGERS = ("log_metric", "log_extra")
"""Methods of `RewardLogs` that reward functions may name."""


def _loggable(value: Any) -> Any:
    """Return a finite number of 64 bits, text, boolean or None unchanged, all else as text."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= 1 << 63:  # a checkpoint takes no such number
        return str(value)
    return value if isinstance(value, str | bool | int | float | None) else str(value)


_thread = threading.local()


def awaited(value: Any) -> Any:
    """Return the value, or the result of awaiting it.

    Each thread keeps one event loop: an async client kept by a function belongs to the loop of its first call.
    """
    if not inspect.isawaitable(value):
        return value
    if not hasattr(_thread, "loop"):
        _thread.loop = asyncio.new_event_loop()
    return _thread.loop.run_until_complete(resolved(value))


async def resolved(value: Awaitable[Any]) -> Any:
    """Return what an awaitable gives, as a coroutine; one that gives another is followed to its end."""
    result = await value
    while inspect.isawaitable(result):
        result = await result
    return result


def describe_error(error: BaseException) -> str:
    """Return `Type: message (file.py:12)` in one line of printable text, never raising.

    The place is the innermost one outside Winnow and libraries; else the entry into a library.
    """
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return (text[:MAX_ERROR] + _place(error)).encode("utf-8", "replace").decode()


def _place(error: BaseException) -> str:
    paths = sysconfig.get_paths()
    libraries = tuple(os.path.join(path, "") for path in (*paths.values(), _OWN))
    packages = tuple(os.path.join(paths[name], "") for name in ("purelib", "platlib"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.isfile(f.filename)]
    frames = [f for f in frames if not f.filename.startswith(os.path.join(_OWN, ""))]
    own = [f for f in frames if not f.filename.startswith(libraries)]
    entered = [f for f in frames if f.filename.startswith(packages)]
    if not own and not entered:
        return ""
    frame = own[-1] if own else entered[0]
    file = os.path.relpath(frame.filename)
    return f" ({os.path.basename(file) if file.startswith('..') else file}:{frame.lineno})"
