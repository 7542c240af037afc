"""File helpers: atomic JSON, fsync, digests, private files, the cache directory; and paths in a configuration.

Those are absolute, so a run resumes from any directory, and have `~` in a run's files.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from .sanitize import home


def readable(directory: Path) -> None:
    """Give safetensors files the mode of the user's umask; the library writes them with 0600."""
    umask = os.umask(0)
    os.umask(umask)
    for path in directory.rglob("*.safetensors"):
        path.chmod(0o666 & ~umask)


def private_directory(path: Path) -> None:
    """Make a directory with mode 0700 (owner only); an existing one keeps its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def private_file(path: Path) -> Path:
    """Create an empty file with mode 0600 (owner only), to be opened later; an existing one is kept."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write a small file atomically; `private`: only its owner can read it."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False), private=private)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write text as `write_json` writes values."""
    temporary = path.with_name(f".{path.name}.writing")
    if private:
        private_file(temporary)
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    temporary.rename(path)
    fsync(path.parent)


def check_output(file: Path) -> None:
    """Raise FileNotFoundError, before anything is computed, if the folder of an output file does not exist."""
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file}: its folder does not exist; make it first.")


def not_json(value: Any, key: str = "") -> str:
    """Return the first value that JSON cannot hold, with its key: `env.timeout_s: inf`."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    for name, inner in pairs:
        try:
            json.dumps(inner, allow_nan=False)
        except (TypeError, ValueError):
            return not_json(inner, f"{key}.{name}" if key else str(name))
    return f"{key or 'an option'}: {value!r}"


def bytes_of(file: Path, most: int = 1 << 30) -> bytes:
    """Read a regular file. Raises OSError on pipes and devices, which may never end, and above `most` bytes."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
        info = os.fstat(opened.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{file}: not a regular file")
        if info.st_size > most:
            raise OSError(f"{file}: too large ({info.st_size:,} bytes, at most {most:,})")
        return opened.read()


def from_json(text: str | bytes, **hooks: Any) -> Any:
    """Parse untrusted JSON as `json.loads` does; ValueError also on nesting too deep for Python."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON; values unknown to JSON count as text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def appears(file: Path, within_s: float) -> bool:
    """Return whether a file is there, or comes within so many seconds: a network's file system may show it later."""
    deadline = time.monotonic() + within_s
    while not (visible := file.is_file()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return visible


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(directory: Path) -> None:
    """Fsync `directory` and every file and folder in it."""
    for path in directory.rglob("*"):
        fsync(path)
    fsync(directory)


def cache_dir() -> Path:
    """Return $WINNOW_CACHE, else $XDG_CACHE_HOME/winnow, else ~/.cache/winnow."""
    own, shared = os.environ.get("WINNOW_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own or Path(shared or Path.home() / ".cache") / "winnow").resolve()


OPTIONS = ("path", "test", "games", "data", "python", "profile")
"""Method options that name files."""


def absolute_paths(values: Mapping[str, Any], methods: Sequence[str], *, resumed: bool = False) -> dict[str, Any]:
    """Make existing paths absolute: `model`, `reward_funcs`, files, patterns and `file.py:Name` of `methods`.

    `resumed`: leave patterns and absolute paths as they are, which the run was saved with.
    """
    # The output directory need not exist; a relative one stays as written.
    return _changed(values, methods, _if_relative if resumed else _absolute_glob, output=os.path.expanduser)


def missing_paths(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, str]:
    """Return the first absolute path of each key at which nothing exists any more."""
    found: dict[str, str] = {}

    def looked_at(key: str, text: str) -> str:
        file = os.path.expanduser(text).partition(":")[0]
        if os.path.isabs(file) and not (os.path.exists(file) or glob(file, recursive=True)):
            found.setdefault(key, file)
        return text

    for key in values:
        _changed({key: values[key]}, methods, partial(looked_at, key), output=str)
    return found


def below_home(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Replace the home directory with `~`, so that a run's files do not name the user."""
    return _changed(values, methods, tilde, output=tilde)


def out_of_home(values: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Undo `below_home`; the paths then point into the current home directory."""
    return _changed(values, methods, os.path.expanduser, output=os.path.expanduser)


def _changed(
    values: Mapping[str, Any], methods: Sequence[str], change: Callable[[str], str], output: Callable[[str], str]
) -> dict[str, Any]:
    result = dict(values)
    for key, its in (("model", change), ("reward_funcs", change), ("output_dir", output)):
        if result.get(key) is not None:
            result[key] = on_texts(result[key], its)
    teacher = result.get("teacher")
    if isinstance(teacher, Mapping) and not teacher.get("url"):  # of a server it is a name
        result["teacher"] = {**teacher, "model": on_texts(teacher.get("model"), change)}
    elif teacher is not None:
        result["teacher"] = on_texts(teacher, change)
    return result | {key: _of_method(result[key], change) for key in methods if key in result}


def _of_method(spec: Any, change: Callable[[str], str]) -> Any:
    """Change paths in a name, section or list of them. A name is a path only with `.py:`: folders can share names."""
    if isinstance(spec, list):
        return [_of_method(each, change) for each in spec]
    if isinstance(spec, dict):
        changed = dict(spec) | {key: on_texts(value, change) for key, value in spec.items() if key in OPTIONS}
        for key in spec.keys() & {"name", "agent"}:
            changed[key] = _of_method(spec[key], change)
        return changed
    return change(spec) if isinstance(spec, str) and ".py:" in spec else spec


def on_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change a text, or the texts of a list; other values stay."""
    if isinstance(value, list):
        return [on_texts(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


def _absolute(text: str) -> str:
    file, colon, name = os.path.expanduser(text).partition(":")
    return str(Path(file).resolve()) + colon + name if file and Path(file).exists() else text


def _if_relative(text: str) -> str:
    return text if os.path.isabs(text) else _absolute(text)


def _absolute_glob(text: str) -> str:
    path = os.path.expanduser(text)
    return os.path.abspath(path) if has_magic(path) and glob(path, recursive=True) else _absolute(text)


def tilde(text: str) -> str:
    """Return a path with `~` for the home directory; any other text unchanged."""
    start = home()
    return "~" + text[len(start) :] if start and text.startswith(start + os.sep) else text
