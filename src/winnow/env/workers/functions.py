"""Functions by name: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth")
MAX_ERROR = 2_000


class FunctionError(ValueError):
    """A function that does not exist; the message gives the nearest name."""


@lru_cache(maxsize=256)
def load_function(target: str) -> Callable[..., Any]:
    """Import the function that `target` names. Raises FunctionError, or what the module raises when imported."""
    source, separator, name = target.rpartition(":")
    if not separator or not source or not name:
        raise FunctionError(f"'{target}': expected 'module:function' or 'path/to/file.py:function'")
    module = _load_file(source) if source.endswith(".py") else _import(source)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            raise FunctionError(f"'{target}': {source} has no '{name}'.{nearest(name, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionError(f"'{target}': '{name}' is a {type(found).__name__}, not a function")
    return found


def _load_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise FunctionError(f"'{path}': no such file.{nearest(file.name, siblings)}")
    name = f"_winnow_file_{abs(hash(str(file)))}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FunctionError(f"'{path}': not a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        known = [m.name for m in pkgutil.iter_modules()] + sorted(sys.modules)
        raise FunctionError(f"no module named '{name}'.{nearest(name, known)}") from None


def nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" It has: {', '.join(sorted(known)[:8])}." if 0 < len(known) <= 8 else ""


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
    """`Type: message` in one line of printable text, never raising."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be shown)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text[:MAX_ERROR].encode("utf-8", "replace").decode()


def json_default(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as plain ones, dates as ISO text. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} cannot be passed to or from a worker process as JSON")
