"""The user's own code behind a run: digests of source files, so that a resume can name those that have changed.

A run starts from functions, classes and objects, given or named in its configuration. Their files count, and so do the
files that these import, at any depth and also inside functions. Files of Python, of installed packages and of Winnow do
not. What has no file of its own counts by its source, or else its byte code: functions of a notebook or of the script
that is run, with the functions, classes and capitalised constants that they name.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..base.files import digest, sha256
from ..config import ConfigError, RunConfig

_INSTALLED = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], str(Path(__file__).parent.parent))
_ELSEWHERE = tuple(os.path.join(os.path.realpath(path), "") for path in _INSTALLED)
MOST_PARTS = 64
"""Largest number of parts of an object or container that are looked at: a longer one holds data."""
LONGEST_NAME = 1_000
DEEPEST = 12
"""Objects within objects that are looked at."""


def code_of(config: RunConfig, objects: Iterable[Any]) -> dict[str, str]:
    """Return a digest of each piece of the user's code: by file, relative to where it is imported from, or by name.

    `objects`: what was given as objects or names. The names in the configuration count, too.
    """
    code = _Code()
    for each in (*config.model_dump().values(), *objects):
        code.add(each)
    return dict(sorted(code.found.items()))


def changes(saved: Mapping[str, str], now: Mapping[str, str], step: int, *, strict: bool) -> str:
    """Return what has changed since a run was saved, as a warning; empty if nothing has, or nothing is known of it.

    A file that was only moved has not changed. Raises ConfigError instead if `strict`.
    """
    gone = [name for name, content in saved.items() if content not in now.values()]
    new = [name for name, content in now.items() if content not in saved.values()]
    if not saved or not (gone or new):
        return ""
    found = f"code of this run has changed since step {step}: {', '.join(sorted({*gone, *new}))}"
    if strict:
        raise ConfigError(f"resume: strict, but {found}; restore it, or go on with resume=warn")
    return (
        f"{found}. The run goes on with the code as it is now; restore it if that is not intended (resume=strict "
        "refuses such changes)"
    )


def _own(path: Path) -> bool:
    """Return whether a file is the user's own."""
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.suffix == ".py" and not installed and not str(path).startswith(_ELSEWHERE) and path.is_file()


class _Code:
    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._files: set[Path] = set()
        self._seen: dict[int, Any] = {}
        """Objects by identity; kept, so that none of them is replaced by another at its address."""

    # ---- files ----------------------------------------------------------------------------------------------------

    def add_named(self, target: str) -> None:
        """Add the file of `module:name` or `path/to/file.py:name`; another text is no name."""
        source, _, name = target.rpartition(":")
        if not all(part.isidentifier() for part in name.split(".")):
            return
        if source.endswith(".py"):
            file = Path(source).expanduser().resolve()
            self._add_file(file, file.parent)
        elif all(part.isidentifier() for part in source.split(".")):
            self._add_module(source, Path.cwd())

    def _add_file(self, file: Path, root: Path) -> None:
        """Add a file and what it imports. `root`: where it is imported from."""
        if file in self._files or not _own(file):
            return
        self._files.add(file)
        name, content = os.path.relpath(file, root), sha256(file)
        self.found[name] = content if name not in self.found else digest([self.found[name], content])
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # what imports it says so
            return
        for module, level in _imports(tree):
            if level:
                package = file.parents[level - 1]
                self._add_below(package, module.split(".") if module else [], root)
            else:
                self._add_module(module, file.parent)

    def _add_module(self, module: str, folder: Path) -> None:
        """Add a module by name, as imported by a file of this folder."""
        top, *rest = module.split(".")
        if top in sys.stdlib_module_names:
            return
        roots = [Path(entry).resolve() for entry in dict.fromkeys((*sys.path, os.getcwd(), str(folder)))]
        places = _places(top)  # an editable install need not be on the path
        for root in (*roots, *places):
            if (root / top / "__init__.py").is_file() or (root / f"{top}.py").is_file():
                return self._add_below(root, [top, *rest], root)
        for root in roots:
            if (root / top).is_dir():  # a package without __init__.py, which comes last
                return self._add_below(root, [top, *rest], root)

    def _add_below(self, folder: Path, parts: list[str], root: Path) -> None:
        """Add the files that importing `parts` from a folder runs. The last part may be a name in a module."""
        if folder != root:
            self._add_file(folder / "__init__.py", root)
        for part in parts:
            file, package = folder / f"{part}.py", folder / part
            if not package.is_dir() or (file.is_file() and not (package / "__init__.py").is_file()):
                self._add_file(file, root)
                return
            self._add_file(package / "__init__.py", root)
            folder = package

    # ---- objects --------------------------------------------------------------------------------------------------

    def add(self, value: Any, depth: int = 0) -> None:
        """Add the code of a function, class, object or name, and of those it holds."""
        if isinstance(value, str):
            if ":" in value and len(value) < LONGEST_NAME:
                self.add_named(value)
            return
        if id(value) in self._seen or depth > DEEPEST:
            return
        self._seen[id(value)] = value
        for part in self._parts(value):
            self.add(part, depth + 1)

    def _parts(self, value: Any) -> Iterator[Any]:
        """Add the code of a value; yield what else belongs to it."""
        if isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset)
        elif isinstance(value, types.FunctionType):
            yield from self._parts_of_function(value)
        elif isinstance(value, type):
            yield from self._parts_of_class(value)
        elif isinstance(value, types.ModuleType):
            self._add_home(value.__name__)
        elif isinstance(value, list | tuple | set | frozenset):
            yield from value if len(value) <= MOST_PARTS else ()
        elif isinstance(value, dict):
            yield from value.values() if len(value) <= MOST_PARTS else ()
        elif _is_followed(type(value).__module__):
            yield type(value)
            held = getattr(value, "__dict__", {})
            yield from held.values() if len(held) <= MOST_PARTS else ()

    def _add_home(self, module: str) -> bool:
        """Add the file of a loaded module; return whether it is the user's and not the script that is run."""
        if module == "__main__" or not _is_own_module(module):
            return False
        file = Path(str(sys.modules[module].__file__)).resolve()
        levels = min(module.count(".") + (file.name == "__init__.py"), len(file.parents) - 1)
        self._add_file(file, file.parents[levels])
        return True

    def _parts_of_function(self, function: types.FunctionType) -> Iterator[Any]:
        yield getattr(function, "__wrapped__", None)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                yield cell.cell_contents
        if self._add_home(function.__module__) or not _without_file(function):
            return
        code = function.__code__
        used = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
        constants = {name: repr(v) for name, v in used.items() if name.isupper() and isinstance(v, _PLAIN)}
        self.found[function.__qualname__] = digest([_source(function), constants])
        for module in _imported(code):
            self._add_module(module, Path.cwd())
        yield from used.values()
        yield from function.__defaults__ or ()

    def _parts_of_class(self, kind: type) -> Iterator[Any]:
        yield from kind.__bases__
        if self._add_home(kind.__module__) or kind.__module__ != "__main__":
            return
        values = {name: repr(value) for name, value in vars(kind).items() if isinstance(value, _PLAIN)}
        own = {name: value for name, value in values.items() if not name.startswith("__")}
        if own:
            self.found[kind.__qualname__] = digest(own)
        yield from vars(kind).values()


_PLAIN = str | bytes | int | float


def _is_followed(module: str) -> bool:
    """Return whether objects of a module's classes are looked into: the user's, Winnow's, and caches of functools."""
    return module in ("__main__", "functools") or module.startswith("winnow.") or _is_own_module(module)


def _is_own_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and _own(Path(file).resolve())


def _without_file(function: types.FunctionType) -> bool:
    """Return whether a function is of the script that is run, a notebook or an `exec`."""
    return function.__module__ == "__main__" or not os.path.isfile(function.__code__.co_filename)


def _each_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _each_code(constant)


def _names(code: types.CodeType) -> list[str]:
    return sorted({name for each in _each_code(code) for name in each.co_names})


def _imported(code: types.CodeType) -> list[str]:
    found = (step for each in _each_code(code) for step in dis.get_instructions(each))
    return sorted({step.argval for step in found if step.opname == "IMPORT_NAME"})


def _source(function: types.FunctionType) -> str:
    """Return a function's source; its byte code without one, and for a lambda, whose line has more than itself."""
    if function.__name__ != "<lambda>":
        try:
            return inspect.getsource(function)
        except (OSError, TypeError):
            pass
    return _byte_code(function.__code__)


def _byte_code(code: types.CodeType) -> str:
    steps = [(step.opname, _shown(step)) for each in _each_code(code) for step in dis.get_instructions(each)]
    return digest(steps)


def _shown(step: dis.Instruction) -> str:
    if isinstance(step.argval, types.CodeType):
        return step.argval.co_name
    return repr(sorted(map(repr, step.argval))) if isinstance(step.argval, frozenset) else step.argrepr


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (module, dots before it) of each import; `from a import b` may import a module b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield ".".join(part for part in (node.module, alias.name) if part), node.level


def _places(top: str) -> list[Path]:
    """Return the folder that a module which is not on the path is imported from."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None or not spec.origin:
        return []
    origin = Path(spec.origin)
    return [origin.parent.parent if origin.name == "__init__.py" else origin.parent]
