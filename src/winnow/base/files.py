"""File helpers: atomic JSON, fsync, digests, private files, the cache directory."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


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


def json_default(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch to plain ones, dates to ISO text. Raises TypeError for others."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


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
