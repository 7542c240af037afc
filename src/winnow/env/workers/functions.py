"""Functions by name: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import asyncio
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ...base.dotted import TargetError, load
from ...base.errors import ConfigError

VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth")
MAX_ERROR = 2_000
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class FunctionError(ConfigError):
    """A function that does not exist; the message gives the nearest name."""


def load_function(target: str) -> Callable[..., Any]:
    """Import the function that `target` names. Raises FunctionError, or what the module raises when imported."""
    try:
        found = load(target)
    except TargetError as error:
        raise FunctionError(str(error)) from None
    if not callable(found):
        name = target.rpartition(":")[2]
        raise FunctionError(f"'{target}': '{name}' is a {type(found).__name__}, not a function")
    return found


def parameters_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Names of a function's parameters -> whether each must be given; `**` stands for any keyword."""
    found = {}
    for name, p in inspect.signature(function).parameters.items():
        if p.kind is p.VAR_KEYWORD:
            found["**"] = False
        elif p.kind is p.POSITIONAL_ONLY:
            raise FunctionError(f"{function_name(function)}: argument '{name}' cannot be given by name")
        elif p.kind is not p.VAR_POSITIONAL:
            found[name] = p.default is p.empty
    return found


def function_name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def inspect_function(target: str) -> dict[str, Any]:
    """`{name, parameters}` of a function by name; what a parent asks a worker before it trusts a target."""
    function = load_function(target)
    return {"name": function_name(function), "parameters": parameters_of(function)}


def call_function(target: str, kwargs: dict[str, Any], log_metric: bool = False) -> dict[str, Any]:
    """Call a function by name in this process: `{value, metrics}`, with what it gave to `log_metric`."""
    metrics: list[tuple[str, float]] = []
    if kwargs.get("trainer_state") is not None:
        kwargs = kwargs | {"trainer_state": SimpleNamespace(**kwargs["trainer_state"])}
    if log_metric:
        kwargs = kwargs | {"log_metric": lambda name, value: metrics.append((str(name), float(value)))}
    value = load_function(target)(**kwargs)
    if inspect.isawaitable(value):
        value = asyncio.run(_wait(value))
    return {"value": value, "metrics": metrics}


async def _wait(value: Any) -> Any:
    return await value


def describe_error(error: BaseException) -> str:
    """`Type: message (file.py:12)` in one line of printable text, never raising.

    The place is the innermost one that is neither Winnow's nor a library's; else where a library was entered.
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


def json_default(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as plain ones, dates as ISO text. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} cannot be passed to or from a worker process as JSON")
