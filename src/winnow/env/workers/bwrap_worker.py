"""Worker processes in bubblewrap: reward code without network, without writable files, with few readable ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .bubblewrap import SandboxError, bubblewrapped, slot_user, temporary
from .seccomp import program

FIRST_SLOT = 128
"""Earlier slots belong to programs written by models."""
DISK_MB, FILES = 64, 1_024


class Cage:
    """Files visible to the workers of one pool: Python, its import directories, `shown`, and a /tmp for each worker.

    Raises SandboxError without bubblewrap, or if Python's files are unreadable for the users that workers run as, or if
    one of those directories is a home directory.
    """

    def __init__(self, shown: Sequence[str] = (), python: str = sys.executable) -> None:
        paths = [os.path.abspath(path) for path in (*sys.path, os.getcwd(), *shown) if os.path.exists(path)]
        shown = [path for path in dict.fromkeys(paths) if not _is_shown_anyway(Path(path))]
        named = os.path.expanduser("~")
        home = Path(os.path.realpath(named if os.path.isabs(named) else "/"))
        for path in shown:
            if home.is_relative_to(os.path.realpath(path)):
                raise SandboxError(
                    f"reward_sandbox: Python imports from {path}, and everything there would be shown; start from a "
                    "directory of its own, and unset PYTHONPATH"
                )
        self.python = python
        self._command = bubblewrapped(python, DISK_MB, FILES, shown)
        if os.geteuid() == 0:
            for path in (os.path.realpath(python), *shown):
                _require_readable(path)

    def around(
        self, slot: int, command: Sequence[str], env: Mapping[str, str], files: ExitStack
    ) -> tuple[list[str], dict[str, Any]]:
        """Return the caged command and options of `Popen`; the files it opens close with `files`.

        Two concurrent commands need two slots.
        """
        seccomp = temporary(files, program()).fileno()
        outside = [*self._command, "--chdir", os.getcwd(), "--remount-ro", "/", "--seccomp", str(seccomp), "--"]
        values = {name: value for name, value in env.items() if name != "TMPDIR"} | {"HOME": "/tmp"}
        options = {"env": values, "pass_fds": (seccomp,), **slot_user(FIRST_SLOT + slot)}
        return [*outside, self.python, *command[1:]], options


def _is_shown_anyway(path: Path) -> bool:
    """Whether every sandbox has it: all of /usr but /usr/local."""
    return path.is_relative_to("/usr") and not path.is_relative_to("/usr/local")


def _require_readable(path: str) -> None:
    """Raise SandboxError unless every user may read `path`: started as root, workers run as another user."""
    for part in (*reversed(Path(path).parents), Path(path)):
        if not part.stat().st_mode & (0o001 if part.is_dir() else 0o004):
            raise SandboxError(
                f"reward_sandbox: {path} cannot be read by other users, which workers are when a run is started as "
                f"root (mode of {part}); start it as an ordinary user, or install Python and the code elsewhere"
            )
