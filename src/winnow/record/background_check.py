"""The check of a large ledger's rows, begun in a process of its own while this one imports what training needs.

`begin(path)`; the next `damage` of that ledger then reads only the rows booked since. As a program:
`python -m winnow.record.background_check LEDGER` prints what it found, and up to which row of each table it looked.
"""

from __future__ import annotations

import atexit
import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from ..base.child import Child, GroupProcess

SMALL_BYTES = 8 << 20
"""A ledger below this is read faster than a process starts."""

LONGEST_S = 600.0
"""Seconds that its answer is waited for; then the rows are read here."""

_begun: dict[Path, Child] = {}


def begin(path: Path) -> None:
    """Start the check. What is no large ledger is left to whoever opens it."""
    if path.is_file() and path.stat().st_size >= SMALL_BYTES:
        command = [sys.executable, "-m", __name__, str(path.resolve())]
        child = _begun[path.resolve()] = Child(GroupProcess(command, stdin=subprocess.DEVNULL))
        atexit.register(child.end)


def begun(path: Path) -> bool:
    return path.resolve() in _begun


def result(path: Path) -> tuple[list[str], dict[str, int]] | None:
    """What `rows.examined` finds, of the ledger as it was when the check began; None where none began, or it failed."""
    child = _begun.pop(path.resolve(), None)
    if child is None:
        return None
    try:
        status = child.finish(time.monotonic() + LONGEST_S)
    except TimeoutError:
        status = None
    finally:
        child.end()
        atexit.unregister(child.end)
    if status != 0:
        return None
    found, last = json.loads(child.stdout)
    return found, last


def _check(path: Path) -> tuple[list[str], dict[str, int]]:
    from .ledger_file import connect
    from .rows import examined

    with closing(connect(path, read_only=True)) as db:
        db.execute("BEGIN")  # one state, should somebody write
        return examined(db)


if __name__ == "__main__":
    try:
        print(json.dumps(_check(Path(sys.argv[1]))))
    except (sqlite3.Error, UnicodeDecodeError):
        sys.exit(1)  # whoever opens it says what is wrong
