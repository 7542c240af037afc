"""Files that are whole or absent: fsync, atomic JSON, digests, modes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def readable(directory: Path) -> None:
    """Give files the mode that the user's umask asks for; safetensors writes its own with 0600."""
    umask = os.umask(0)
    os.umask(umask)
    for path in directory.rglob("*.safetensors"):
        path.chmod(0o666 & ~umask)


def write_json(path: Path, value: Any) -> None:
    """Write a small file so that it is whole or absent."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(value, indent=1, allow_nan=False), encoding="utf-8")
    fsync(temporary)
    temporary.rename(path)
    fsync(path.parent)


def not_json(value: Any, key: str = "") -> str:
    """The first value in there that JSON cannot hold, with its key: `env.timeout_s: inf`."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in pairs:
        try:
            json.dumps(inner, allow_nan=False)
        except (TypeError, ValueError):
            return not_json(inner, f"{key}.{name}" if key else str(name))
    return f"{key or 'an option'}: {value!r}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(directory: Path) -> None:
    """Every file and folder in `directory`, and itself."""
    for path in directory.rglob("*"):
        fsync(path)
    fsync(directory)
