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
from contextlib import closing
from pathlib import Path

from .ledger_file import UNREADABLE, connect
from .rows import COLUMNS, damaged_rows, examined

SMALL_BYTES = 8 << 20
"""A ledger below this is read faster than a process starts."""

LONGEST_S = 600.0
"""Seconds that its answer is waited for; then the rows are read here."""

_begun: dict[Path, subprocess.Popen[bytes]] = {}


def begin(path: Path) -> None:
    """Start the check. What is no large ledger is left to whoever opens it."""
    if path.is_file() and path.stat().st_size >= SMALL_BYTES:
        command = [sys.executable, "-m", __name__, str(path.resolve())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        _begun[path.resolve()] = process
        atexit.register(process.kill)


def begun(path: Path) -> bool:
    return path.resolve() in _begun


def result(path: Path) -> tuple[list[str], dict[str, int]] | None:
    """What `rows.examined` finds, of the ledger as it was when the check began; None where none began, or it failed."""
    process = _begun.pop(path.resolve(), None)
    if process is None:
        return None
    atexit.unregister(process.kill)
    try:
        said = process.communicate(timeout=LONGEST_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    if process.returncode != 0:
        return None
    found, last = json.loads(said)
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
        db.execute("BEGIN")  # one state, should somebody write
        return examined(db)


if __name__ == "__main__":
    try:
        print(json.dumps(_check(Path(sys.argv[1]))))
    except (sqlite3.Error, UnicodeDecodeError):
        sys.exit(1)  # whoever opens it says what is wrong
