"""The user's own source files, and which of them processes that replace one another have read."""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .files import sha256

_INSTALLED = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], str(Path(__file__).parent.parent))
_NOT_OWN = tuple(os.path.join(os.path.realpath(path), "") for path in _INSTALLED)
MAX_FILES = 1024
"""Files that are remembered, so that a process cannot fill the memory of its parent."""


def is_own(path: Path) -> bool:
    """Return whether a file is the user's own: not Python's, of an installed package, or of Winnow."""
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.suffix == ".py" and not installed and not str(path).startswith(_NOT_OWN) and os.path.isfile(path)


def imported(seen: set[str]) -> dict[str, str]:
    """Return digests of the user's files behind modules that are not in `seen`, to which they are added."""
    read = {}
    for name in [name for name in sys.modules if name not in seen]:
        seen.add(name)
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and is_own(path := Path(file).resolve()):
            with suppress(OSError):
                read[str(path)] = sha256(path)
    return read


class FirstRead:
    """The user's files as the first process of a kind has read them. Warns once of each that a later one reads
    otherwise."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._digests: dict[str, str] = {}
        self._changed: set[str] = set()

    def compare(self, read: Mapping[str, str]) -> None:
        for file, content in read.items():
            if len(self._digests) < MAX_FILES:
                self._digests.setdefault(file, content)
            if self._digests.get(file, content) != content and file not in self._changed:
                self._changed.add(file)
                warnings.warn(
                    f"{file!r} has changed since the run began: a replaced {self._kind} has read it as it is now, and "
                    "others go on with what they read before, so rewards may differ; restore it, or stop the run and "
                    "resume it",
                    stacklevel=2,
                )
