"""A ledger whose bytes are not those that were written is told from a whole one, by everything that reads it."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from winnow.cli.main import app
from winnow.record.ledger import TABLES, Ledger, LedgerError
from winnow.study.report import write_report

from ..builders.ledgers import book_step, ledger, path, visit

__all__ = ["ledger", "path"]  # fixtures


@pytest.fixture
def marks(path: Path) -> list[dict[str, object]]:
    """Of a ledger of 16 steps that was rolled back once; the second is in its last checkpoint."""
    with Ledger.open(path) as ledger:
        ledger.set_meta("max_lag", "20")
        found = [ledger.mark()]
        for step in range(8):
            book_step(ledger, step)
        found.append(ledger.mark())
        for step in range(8, 12):
            book_step(ledger, step)
        ledger.rollback(found[1], reason="killed")
        for step in range(8, 16):
            book_step(ledger, step)
        found.append(ledger.mark())
        ledger.visit([visit(32)], step=16, version=16)
    return found


def contents(path: Path) -> list[object]:
    with closing(sqlite3.connect(path)) as db:
        return [db.execute(f"SELECT * FROM {table}").fetchall() for table in (*TABLES, "meta", "restarts")]


def refusal(path: Path, mark: object) -> list[str]:
    """What `verify` and `rollback` say against the ledger."""
    said = []
    try:
        with Ledger.open(path, read_only=True) as ledger:
            said += ledger.verify({"last": mark}).problems  # type: ignore[dict-item]
    except LedgerError as error:
        said.append(str(error))
    try:
        with Ledger.open(path) as ledger:
            ledger.rollback(mark, reason="killed")  # type: ignore[arg-type]
    except LedgerError as error:
        said.append(str(error))
    return said


@pytest.mark.slow
def test_every_flipped_byte_is_found_or_changes_nothing(path: Path, marks: list[dict[str, object]]) -> None:
    whole, right = path.read_bytes(), contents(path)
    draw, found, unread = random.Random(5), 0, 0
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        said = refusal(path, marks[2])
        for name in ("-wal", "-shm"):
            path.with_name(path.name + name).unlink(missing_ok=True)
        if said:
            found += 1
            assert len(said) == 2, said  # both of them, or neither
        else:
            path.write_bytes(flipped)
            assert contents(path) == right  # a byte that no row is made of
            unread += 1
    assert found > 50
    assert unread > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE rollouts SET reward = 0.25 WHERE row = 7", "rollouts, row 7: not what was written"),
        ("UPDATE outcomes SET fate = 'filtered'", r"row 5: not what was written.*and 35 more rows of outcomes"),
        ("DELETE FROM steps WHERE row = 3", "steps has 19 rows, the last of them is number 20"),
        ("UPDATE meta SET value = '99' WHERE key = 'max_lag'", "meta, key max_lag: not what was written"),
        ("UPDATE rollouts SET rewards = CAST(x'ff' AS TEXT) WHERE row = 2", "Could not decode"),
        ("UPDATE visits SET visit = 'x' WHERE row = 2", "visits, row 2: not what was written"),
    ],
)
def test_changed_rows_are_named(path: Path, marks: list[dict[str, object]], change: str, message: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(change)
    with Ledger.open(path, read_only=True) as ledger, pytest.raises(LedgerError, match=f"damaged.*{message}"):
        ledger.verify()
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match=f"damaged.*{message}"):
        ledger.rollback(marks[2], reason="killed")


ENDLESS = "WITH RECURSIVE n(row) AS (SELECT 1 UNION ALL SELECT row + 1 FROM n) SELECT row, '' AS key FROM n"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("DROP INDEX one_visit", "one_visit"),
        ("CREATE TRIGGER t AFTER INSERT ON visits BEGIN DELETE FROM rollouts; END", "t"),
        ("CREATE TABLE more (x)", "more"),
        ("CREATE INDEX by_prompt ON visits (prompt_id)", "by_prompt"),
        (f"DROP TABLE evaluations; CREATE VIEW evaluations AS {ENDLESS}", "evaluations"),
        (f"DROP TABLE meta; CREATE VIEW meta AS {ENDLESS}", "meta"),
        (f"DROP VIEW visit_fates; CREATE VIEW visit_fates AS {ENDLESS}", "visit_fates"),
    ],
)
def test_tables_of_somebody_else_are_refused_before_anything_runs(
    path: Path, marks: list[dict[str, object]], change: str, name: str
) -> None:
    """A view may never end, and a trigger does what it likes with the rows."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    for read_only in (True, False):
        with pytest.raises(LedgerError, match=f"damaged.*its tables are not a ledger's: '{name}'"):
            Ledger.open(path, read_only=read_only)


def test_lost_tail_and_older_copy_are_told_by_the_checkpoint(path: Path, marks: list[dict[str, object]]) -> None:
    with Ledger.open(path) as ledger:
        ledger.rollback(marks[1], reason="an older copy of the ledger")
    proof = Ledger.open(path, read_only=True).verify({"checkpoints/step-000016": marks[2]})
    assert any("not the ledger that checkpoints/step-000016 was saved with: visits has" in p for p in proof.problems)


def test_commands_say_it_without_a_traceback(path: Path, marks: list[dict[str, object]]) -> None:
    run = path.parent
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    saved = run / "checkpoints" / "step-000016"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text(json.dumps({"ledger": marks[1]}))
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert "not the ledger that checkpoints/step-000016/state.json was saved with" not in done.output
    (saved / "state.json").write_text(
        json.dumps({"ledger": {**marks[1], "visits": {"last": 3, "rows": 9, "sha256": ""}}})
    )
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert done.exit_code == 1
    assert "checkpoints/step-000016/state.json was saved with: visits has 3 of the 9 rows" in done.output.replace(
        "\n", ""
    )
    (saved / "state.json").write_text("{")
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert (done.exit_code, "step-000016/state.json: damaged" in done.output.replace("\n", "")) == (1, True)
    (saved / "state.json").unlink()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE rollouts SET rewards = CAST(x'ff' AS TEXT) WHERE row = 2")
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert (done.exit_code, "ledger.sqlite: damaged" in done.output.replace("\n", "")) == (1, True)
    write_report([run], run / "report.html")
    assert "ledger.sqlite cannot be used" in (run / "report.html").read_text()
