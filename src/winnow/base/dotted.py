"""Loads objects by dotted path: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError


class TargetError(ConfigError):
    """A dotted path that cannot be loaded, or names the wrong kind of object."""


@lru_cache(maxsize=256)
def load(target: str) -> Any:
    """Import the object named by `target`. Raises TargetError, or any error the module raises when imported."""
    source, separator, name = target.rpartition(":")
    if not separator or not source or not name:
        raise TargetError(f"'{target}': expected 'module:name' or 'path/to/file.py:name'")
    module = _load_file(source) if source.endswith(".py") else _import(source)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            raise TargetError(f"'{target}': {source} has no '{name}'.{nearest(name, known)}")
        found = getattr(found, part)
    return found


def _load_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise TargetError(f"'{path}': no such file.{nearest(file.name, siblings)}")
    # the same in every process: ranks unpickle a loss of this file by its module
    name = f"_winnow_file_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TargetError(f"'{path}': not a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    """Import a module, also from the working directory, which a console script does not search by itself."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        known = [m.name for m in pkgutil.iter_modules()] + sorted(sys.modules)
        raise TargetError(f"no module named '{name}'.{nearest(name, known)}") from None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return ` Did you mean 'x'?`, or empty text without a close name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ` Did you mean 'x'?`, or all known names if they are few."""
    few = f" It has: {', '.join(sorted(known)[:8])}." if 0 < len(known) <= 8 else ""
    return did_you_mean(name, known) or few


def class_for(table: Mapping[str, type], target: str) -> type:
    """Return the class named by `target`, to be used like those of a method table.

    Raises TargetError unless it is a frozen dataclass (its fields are its options) with the table's `interface`.
    """
    found = load(target)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        what = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise TargetError(f"'{target}': is {what}; needs a frozen dataclass, whose fields are its options")
    if not found.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TargetError(f"'{target}': dataclass is not frozen; write @dataclass(frozen=True)")
    has = _attributes(found)
    missing = [name for name in interface(table) if name not in has]
    if missing and "build" not in has:
        raise TargetError(f"'{target}': missing {', '.join(missing)}; add them as in {next(iter(table))}")
    return found


def interface(table: Mapping[str, type]) -> list[str]:
    """Return the attributes all classes of a table share: `build`, or else their methods and properties."""
    if hasattr(table[next(iter(table))], "build"):
        return ["build"]
    return sorted(set.intersection(*(_attributes(cls) for cls in table.values())))


def _attributes(cls: type) -> set[str]:
    call = {"__call__"} if any("__call__" in vars(base) for base in cls.__mro__) else set()
    fields = {field.name for field in dataclasses.fields(cls)}
    return {name for name in dir(cls) if not name.startswith("_")} | fields | call
