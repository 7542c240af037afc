"""A power cut at any moment: what a mark covers is in the ledger, and a resume from it works (matrix row 6)."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from winnow.record import ledger as ledger_module
from winnow.record.ledger import Ledger, LedgerError

from ..builders.ledgers import book_step
from .power_cut import FOLDER, Note, Operation, Sync, Write, cut, library, recorded

SQLITE = library()
pytestmark = pytest.mark.skipif(SQLITE is None, reason="SQLite is built into this Python")
STEPS = 40


def operations(folder: Path) -> list[Operation]:
    """Of a run that marks its ledger every fifth step, and goes on."""
    assert SQLITE is not None
    fsync = ledger_module.fsync
    with (
        recorded(SQLITE) as log,
        pytest.MonkeyPatch.context() as patch,
        Ledger.open(folder / "ledger.sqlite") as ledger,
    ):
        patch.setattr(ledger_module, "fsync", lambda path: (log.operations.append(Sync(FOLDER)), fsync(path)))
        ledger.set_meta("max_lag", "100")
        log.note(ledger.mark())
        for step in range(STEPS):
            book_step(ledger, step)
            if step % 5 == 4:
                log.note(ledger.mark())
    return log.operations


def problems(folder: Path, log: list[Operation], cuts: int) -> list[str]:
    """What a resume finds after each of the cuts, if it is anything but the ledger of the last mark before it."""
    found: list[str] = []
    rng = random.Random(0)
    first = next(i for i, operation in enumerate(log) if isinstance(operation, Note))
    for number in range(cuts):
        at = rng.randrange(first + 1, len(log) + 1)
        for old in folder.iterdir():
            old.unlink()
        for name, data in cut(log[:at], rng).items():
            if not name.endswith("-shm"):
                (folder / name).write_bytes(data)
        mark = [operation.value for operation in log[:at] if isinstance(operation, Note)][-1]
        try:
            with Ledger.open(folder / "ledger.sqlite") as ledger:
                ledger.rollback(mark, reason="power cut")
                proof = ledger.verify({"mark": mark})
                found += [f"cut {number}: {problem}" for problem in proof.problems]
        except LedgerError as error:
            found.append(f"cut {number}: {error}")
    return found


@pytest.mark.parametrize("cuts", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_what_was_marked_is_there_after_any_cut(tmp_path: Path, cuts: int) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "run").mkdir()
    log = operations(tmp_path / "run")
    assert sum(isinstance(operation, Write) for operation in log) > 500
    assert problems(tmp_path / "cut", log, cuts) == []


def test_a_cut_takes_away_what_was_not_synced(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    (tmp_path / "cut").mkdir()
    (tmp_path / "run").mkdir()
    log = [operation for operation in operations(tmp_path / "run") if not isinstance(operation, Sync)]
    assert len(problems(tmp_path / "cut", log, 20)) > 10


@pytest.mark.slow
def test_a_mark_without_its_sync_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of a mark is synced by `synchronous = FULL`: with NORMAL alone a cut may lose it."""
    execute = ledger_module.sqlite3.Connection.execute

    class Relaxed(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            return execute(
                self, sql.replace("= FULL", "= NORMAL").replace("wal_checkpoint(PASSIVE)", "page_size"), *arguments
            )

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Relaxed, **k))
    (tmp_path / "cut").mkdir()
    (tmp_path / "run").mkdir()
    assert problems(tmp_path / "cut", operations(tmp_path / "run"), 100)


def test_the_settings_are_those_that_are_promised(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        book_step(ledger, 0)
        assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert ledger._db.execute("PRAGMA synchronous").fetchone() == (1,), "NORMAL between marks"
        ledger.mark()
        assert ledger._db.execute("PRAGMA synchronous").fetchone() == (1,)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
