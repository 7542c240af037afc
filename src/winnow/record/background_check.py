"""Check the rows of a large ledger in a separate process, while this one imports what training needs.

After `begin(path)` the next `damage` of that ledger reads only newer rows. As a program,
`python -m winnow.record.background_check LEDGER` prints the damage, and the last row of each table that it checked.
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
from .ledger_file import UNREADABLE, connect
from .rows import COLUMNS, damaged_rows, examined

SMALL_BYTES = 8 << 20
"""A ledger below this is read faster than a process starts."""

LONGEST_S = 600.0
"""Seconds to wait for the result; then the rows are read here."""

_begun: dict[Path, Child] = {}


def begin(path: Path) -> None:
    """Start the check. Smaller ledgers are checked when they are opened."""
    if path.is_file() and path.stat().st_size >= SMALL_BYTES:
        command = [sys.executable, "-m", __name__, str(path.resolve())]
        child = _begun[path.resolve()] = Child(GroupProcess(command, stdin=subprocess.DEVNULL))
        atexit.register(child.end)


def begun(path: Path) -> bool:
    return path.resolve() in _begun


def result(path: Path) -> tuple[list[str], dict[str, int]] | None:
    """Return `rows.examined` of the ledger as it was when the check began; None without a check, or if it failed."""
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


def damage(db: sqlite3.Connection, path: Path) -> list[str]:
    """What is not as it was written: structure, tables, missing rows, contents; empty for a whole ledger.

    Reads everything once, some 7 s for a million rollouts; or what a check that was begun has not read.
    """
    try:
        found, read = result(path) or examined(db)
        return found or [f for table in COLUMNS for f in damaged_rows(db, table, read.get(table, 0))]
    except UNREADABLE as error:
        return [str(error)]


def _check(path: Path) -> tuple[list[str], dict[str, int]]:
    with closing(connect(path, read_only=True)) as db:
        db.execute("BEGIN")  # one state, even if another process writes
        return examined(db)


if __name__ == "__main__":
    try:
        print(json.dumps(_check(Path(sys.argv[1]))))
    except (sqlite3.Error, UnicodeDecodeError):
        sys.exit(1)  # opening it reports the cause
