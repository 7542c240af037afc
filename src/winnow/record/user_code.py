"""The user's own code behind a run: digests of source files, so that a resume can name those that have changed.

A run starts from functions, classes and objects, given or named in its configuration. Their files count, and so do the
files that these import, at any depth and also inside functions, or name in a constant (`"file.py:name"`, as
`EnvPool.make` takes it). Files of Python, of installed packages and of Winnow do not. What has no file of its own
counts by its byte code: functions of a notebook or of the script that is run, with the functions, classes and
capitalised constants that they name.
"""

from __future__ import annotations

import ast
import dis
import gc
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..base.errors import ConfigError
from ..base.files import digest, sha256

_INSTALLED = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], str(Path(__file__).parent.parent))
_NOT_OWN = tuple(os.path.join(os.path.realpath(path), "") for path in _INSTALLED)
_TARGET = re.compile(r"[\w./-]+\.py:[A-Za-z_][\w.]*")
MAX_PARTS = 128
"""Largest number of parts of an object or container that are looked at: a longer one holds data."""


def code_of(values: Iterable[Any]) -> dict[str, str]:
    """Return a digest of each piece of the user's code: by file, relative to where it is imported from, or by name.

    `values`: those of the configuration, and what was given as objects or names.
    """
    PathFinder.invalidate_caches()
    code = _Code()
    seen: dict[int, Any] = {}  # kept, so that none of them is replaced by another at its address
    left = list(values)
    while left:
        value = left.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            left += code.add(value)
    return dict(sorted(code.digests.items()))


def changes(saved: Mapping[str, str], now: Mapping[str, str], step: int, *, strict: bool) -> str:
    """Return what has changed since a run was saved, as a warning; empty if nothing has, or nothing is known of it.

    A file that was only moved has not changed. Raises ConfigError instead if `strict`.
    """
    gone = [name for name, content in saved.items() if content not in now.values()]
    new = [name for name, content in now.items() if content not in saved.values()]
    if not saved or not (gone or new):
        return ""
    changed = f"code of this run has changed since step {step}: {', '.join(sorted({*gone, *new}))}"
    if strict:
        raise ConfigError(f"resume: strict, but {changed}; restore it, or go on with resume=warn")
    return (
        f"{changed}. The run goes on with the code as it is now; restore it if that is not intended (resume=strict "
        "refuses such changes)"
    )


class _Code:
    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._files: set[Path] = set()

    def add(self, value: Any) -> list[Any]:
        """Add the code of a function, class, object or name; return what else belongs to it."""
        if isinstance(value, str):
            self._add_named(value)
            return []
        if isinstance(value, ModuleType):
            self._add_home(value.__name__)
            return []
        if isinstance(value, FunctionType | type):
            self._add_home(value.__module__)
            in_script = value.__module__ == "__main__"
            if isinstance(value, type):
                return [*value.__bases__, *(self._add_class(value) if in_script else ())]
            return [value.__dict__, value.__closure__, *(self._add_function(value) if in_script else ())]
        kind = type(value).__module__
        followed = kind in ("__main__", "builtins", "functools") or kind.startswith("winnow.") or _file_of(kind)
        parts = gc.get_referents(value) if followed else []
        return parts if len(parts) <= MAX_PARTS else []

    def _add_class(self, kind: type) -> list[Any]:
        """Add the constants of a class of a script or notebook; return its members."""
        if constants := {name: value for name, value in _constants(vars(kind)).items() if not name.startswith("__")}:
            self.digests[kind.__qualname__] = digest(constants)
        return list(vars(kind).values())

    def _add_function(self, function: FunctionType) -> list[Any]:
        """Add a function of a script or notebook; return the values it names."""
        codes = list(_nested(function.__code__))
        names = sorted({name for code in codes for name in code.co_names})
        used = {name: function.__globals__[name] for name in names if name in function.__globals__}
        constants = {name: value for name, value in _constants(used).items() if name.isupper()}
        self.digests[function.__qualname__] = digest([[_byte_code(code) for code in codes], constants])
        for code in codes:
            self._add_targets(code.co_consts)
            for step in dis.get_instructions(code):
                if step.opname == "IMPORT_NAME":
                    self._add_import(step.argval, Path.cwd())
        return [*used.values(), function.__defaults__]

    def _add_named(self, target: str) -> None:
        """Add the file of `module:name` or `path/to/file.py:name`; another text is no name."""
        source, _, name = target.rpartition(":")
        if not all(part.isidentifier() for part in name.split(".")):
            return
        if source.endswith(".py"):
            file = Path(source).expanduser().resolve()
            self._add_file(file, file.parent)
        else:
            self._add_import(source, Path.cwd())

    def _add_targets(self, constants: Iterable[Any]) -> None:
        """Add the files that constants name."""
        for constant in constants:
            if isinstance(constant, str) and _TARGET.fullmatch(constant):
                with suppress(OSError, RuntimeError):  # unreadable, or a loop of links: who imports it says so
                    self._add_named(constant)

    def _add_home(self, module: str) -> None:
        """Add the file of a loaded module, if it is the user's and not the script that is run."""
        if (file := _file_of(module)) is not None:
            self._add_file(file, file.parents[module.count(".") + (file.name == "__init__.py")])

    def _add_import(self, module: str, root: Path) -> None:
        """Add the files that importing a module runs; its last part may be a name in it. `root`: searched first."""
        search = [str(root), *sys.path, os.getcwd()]
        for depth, part in enumerate(module.split(".")):
            spec = PathFinder.find_spec(part, search)
            if spec is None:
                return
            if spec.origin is not None:  # else a package without __init__.py
                file = Path(spec.origin).resolve()
                if not _is_own(file):
                    return
                self._add_file(file, file.parents[depth + (file.name == "__init__.py")])
            search = list(spec.submodule_search_locations or ())

    def _add_file(self, file: Path, root: Path) -> None:
        """Add a file and what it imports. `root`: where it is imported from."""
        if file in self._files or not _is_own(file):
            return
        self._files.add(file)
        name, content = os.path.relpath(file, root), sha256(file)
        self.digests[name] = content if name not in self.digests else digest([self.digests[name], content])
        with suppress(SyntaxError, ValueError, RecursionError):  # what imports it says so
            tree = ast.parse(file.read_bytes())
            for module in _imports(tree, Path(name).parts):
                self._add_import(module, root)
            self._add_targets(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))


def _imports(tree: ast.AST, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the modules that a file at `path` imports; `from a import b` may import a module `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path[: -node.level] if node.level else ()
            yield from (".".join(filter(None, (*package, node.module, alias.name))) for alias in node.names)


def _is_own(path: Path) -> bool:
    """Return whether a file is the user's own."""
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.suffix == ".py" and not installed and not str(path).startswith(_NOT_OWN) and os.path.isfile(path)


def _file_of(module: str) -> Path | None:
    """Return the file of a loaded module of the user's; None for others, and for the script that is run."""
    file = None if module == "__main__" else getattr(sys.modules.get(module), "__file__", None)
    path = None if file is None else Path(file).resolve()
    return path if path is not None and _is_own(path) else None


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _byte_code(code: CodeType) -> list[Any]:
    """Return what code does by itself, without the place of its source."""
    plain = [each for each in code.co_consts if not isinstance(each, CodeType)]
    constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each) for each in plain]
    return [code.co_code.hex(), code.co_names, constants]


def _constants(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in values.items() if isinstance(value, str | bytes | int | float)}
