"""The file of a ledger: its schema, and creating, opening and checking it."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

from ..base.errors import ExpectedError
from ..base.files import private_file

LEDGER = "ledger.sqlite"
"""Its name in a run directory."""
SCHEMA_VERSION = 2
APPLICATION_ID = 0x57696E6E  # "Winn"
BUSY_TIMEOUT_S = 10.0

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE visits (
  row INTEGER PRIMARY KEY, visit INTEGER NOT NULL, step INTEGER NOT NULL, version INTEGER NOT NULL,
  epoch INTEGER NOT NULL, prompt_id TEXT NOT NULL, ordinal INTEGER NOT NULL, keep INTEGER NOT NULL,
  reason TEXT NOT NULL, probability REAL NOT NULL, time REAL NOT NULL,
  checksum INTEGER NOT NULL, void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE outcomes (
  row INTEGER PRIMARY KEY, visit INTEGER NOT NULL, step INTEGER NOT NULL, fate TEXT NOT NULL, reason TEXT NOT NULL,
  group_size INTEGER NOT NULL, mean_reward REAL, zero_variance TEXT, time REAL NOT NULL,
 
  checksum INTEGER NOT NULL, void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE rollouts (
  row INTEGER PRIMARY KEY, visit INTEGER NOT NULL, sibling INTEGER NOT NULL, step INTEGER NOT NULL,
  fate TEXT NOT NULL, reason TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, tokens INTEGER NOT NULL,
  env_tokens INTEGER NOT NULL, reward REAL, rewards TEXT NOT NULL, first_version INTEGER, last_version INTEGER,
  seconds REAL NOT NULL, stop_reason TEXT NOT NULL, survival_p REAL NOT NULL,
  checksum INTEGER NOT NULL, void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE steps (
  row INTEGER PRIMARY KEY, step INTEGER NOT NULL, version INTEGER, seconds TEXT NOT NULL, metrics TEXT NOT NULL,
  time REAL NOT NULL,
  checksum INTEGER NOT NULL, void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE evaluations (
  row INTEGER PRIMARY KEY, step INTEGER NOT NULL, rollouts INTEGER NOT NULL, tokens INTEGER NOT NULL,
  seconds REAL NOT NULL, time REAL NOT NULL,
  checksum INTEGER NOT NULL, void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE restarts (
  number INTEGER PRIMARY KEY, reason TEXT NOT NULL, voided TEXT NOT NULL, time REAL NOT NULL,
  checksum INTEGER NOT NULL);
CREATE UNIQUE INDEX one_visit ON visits (visit) WHERE void = 0;
CREATE UNIQUE INDEX one_outcome ON outcomes (visit) WHERE void = 0;
CREATE UNIQUE INDEX one_rollout ON rollouts (visit, sibling) WHERE void = 0;
CREATE UNIQUE INDEX one_step ON steps (step) WHERE void = 0;
CREATE VIEW visit_fates AS
  SELECT v.visit, v.step AS dispatched, v.version, v.epoch, v.prompt_id, v.ordinal,
         o.fate, o.reason, o.step AS finished, o.group_size, o.mean_reward, o.zero_variance
  FROM visits v LEFT JOIN outcomes o ON o.visit = v.visit AND o.void = 0 WHERE v.void = 0;
"""


UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of reading a damaged file; the second when SQLite quotes its bytes in a message."""


class LedgerError(ExpectedError):
    """The file is not usable as the ledger of this run; the message has the cause and the remedy."""


def open_file(path: Path, read_only: bool) -> sqlite3.Connection:
    """See `Ledger.open`."""
    if read_only and not path.is_file():
        raise FileNotFoundError(f"{path}: no such ledger; check that its folder is a run directory")
    if not read_only and not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: cannot create a ledger: the folder does not exist; create it first")
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(closing(connect(path, read_only)))
            _check(path, connection, read_only)
        except sqlite3.OperationalError as error:
            raise LedgerError(
                f"{path}: cannot open: {error}. Is another process using this run directory, or the file damaged?"
            ) from error
        except UNREADABLE as error:
            raise LedgerError(damaged(path, error)) from error
        stack.pop_all()
    return connection


def connect(path: Path, read_only: bool) -> sqlite3.Connection:
    uri = path.resolve().as_uri()
    if read_only:
        # Without a write-ahead log no process writes; `immutable` then keeps SQLite from creating one.
        uri += "?mode=ro" if path.with_name(path.name + "-wal").exists() else "?mode=ro&immutable=1"
    else:
        private_file(path)  # SQLite gives its log the same mode
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _check(path: Path, db: sqlite3.Connection, read_only: bool) -> None:
    """Create the schema in an empty file; refuse other files, damaged ledgers and other versions."""
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    empty = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0
    if empty and application_id == 0 and not read_only:
        _create(db)
        return
    if empty or application_id != APPLICATION_ID:
        what = "is empty" if empty else "is an SQLite file but not a Winnow ledger"
        raise LedgerError(f"{path}: {what}. Name another run directory, or move this file away.")
    if version != SCHEMA_VERSION:
        newer = version > SCHEMA_VERSION
        remedy = "Upgrade winnow-rl" if newer else "Finish its run with winnow-rl 0.1, or start a new run directory"
        raise LedgerError(
            f"{path}: written by {'a newer' if newer else 'an earlier'} Winnow (ledger schema {version}, this one has "
            f"{SCHEMA_VERSION}). {remedy}."
        )
    if found := schema_damage(db):
        raise LedgerError(damaged(path, found))
    result = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if result != "ok":
        raise LedgerError(damaged(path, result))
    if not read_only:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")


def schema_damage(db: sqlite3.Connection) -> str:
    """Return what is wrong with tables, indexes, views and triggers, or an empty text. Reads no rows."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    with closing(sqlite3.connect(":memory:")) as new:
        new.executescript(SCHEMA)
        return "" if new.execute(query).fetchall() == db.execute(query).fetchall() else "its tables are not a ledger's"


def _create(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
    db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {pragmas} COMMIT;")


def damaged(path: Path, detail: object) -> str:
    """Return the message for a file whose contents have changed."""
    return f"{path}: damaged or not an SQLite file ({detail}). Restore it from a copy, or start a new run directory."
