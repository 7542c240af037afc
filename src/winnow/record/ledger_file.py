"""The file of a ledger: its schema, creating, opening and checking it, and its rows, each with a checksum."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ExpectedError
from ..base.files import private_file
from ..types import Fate, Rollout, Visit

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
        inside = path.parent / "winnow" / path.name
        remedy = f"name {inside.parent}" if inside.is_file() else "check that its folder is a run directory"
        raise FileNotFoundError(f"{path}: no such ledger; {remedy}")
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
        remedy = "Upgrade winnow-rl" if newer else "Start a new run directory"
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
    """Return the names of tables, indexes, views and triggers that differ from a ledger's. Reads no rows."""
    query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    with closing(sqlite3.connect(":memory:")) as new:
        new.executescript(SCHEMA)
        differing = {*new.execute(query)} ^ {*db.execute(query)}
    names = sorted({f"{name!r:.100}" for name, _ in differing})
    return f"its tables are not a ledger's: {', '.join(names[:PROBLEMS_SHOWN])}" if names else ""


def _create(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
    db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {pragmas} COMMIT;")


def damaged(path: Path, detail: object) -> str:
    """Return the message for a file whose contents have changed."""
    return f"{path}: damaged or not an SQLite file ({detail}). Restore it from a copy, or start a new run directory."


PROBLEMS_SHOWN = 5
"""Problems of one kind that are listed; the rest are counted."""

COLUMNS = {
    "meta": "key, value",
    "visits": "visit, step, version, epoch, prompt_id, ordinal, keep, reason, probability, time",
    "outcomes": "visit, step, fate, reason, group_size, mean_reward, zero_variance, time",
    "rollouts": "visit, sibling, step, fate, reason, prompt_tokens, tokens, env_tokens, reward, rewards,"
    " first_version, last_version, seconds, stop_reason, survival_p",
    "steps": "step, version, seconds, metrics, time",
    "evaluations": "step, rollouts, tokens, seconds, time",
    "restarts": "number, reason, voided, time",
}
AT_ONCE = 32
"""Rows of one INSERT. Each statement releases the interpreter, and getting it back waits for an update's thread."""


@lru_cache
def _insert(table: str, rows: int) -> str:
    columns = COLUMNS[table]
    values = f"({', '.join('?' * (columns.count(',') + 2))})"
    conflict = " ON CONFLICT (key) DO UPDATE SET value = excluded.value, checksum = excluded.checksum"
    start = f"INSERT INTO {table} ({columns}, checksum) VALUES {', '.join([values] * rows)}"
    return start + (conflict if table == "meta" else "")


NUMBERED = {name: "row" for name in COLUMNS if name != "meta"} | {"restarts": "number"}
"""Tables whose rows are numbered from 1 and never deleted, with the column of the number."""


def insert(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add rows to a table; values are in the order of its columns."""
    insert_stored(db, table, [stored(row) for row in rows])


def stored(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row as it is stored, with its checksum."""
    text = repr(row)
    if "-0.0" in text:  # SQLite would store -0.0 as 0.0
        row = tuple(value + 0.0 if isinstance(value, float) else value for value in row)
        text = repr(row)
    return (*row, checksum(text))


def insert_stored(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    whole = len(rows) - len(rows) % AT_ONCE
    for first in range(0, whole, AT_ONCE):
        db.execute(_insert(table, AT_ONCE), list(chain.from_iterable(rows[first : first + AT_ONCE])))
    db.executemany(_insert(table, 1), rows[whole:])


def checksum(text: str) -> int:
    """Return 64 bits over the text of a row, without its number and `void`.

    Protects against damage, not forgery: anyone who can write the file can write its checksums.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def damaged_rows(db: sqlite3.Connection, table: str) -> Iterator[str]:
    """Yield missing rows of a table, and rows that are not as they were written."""
    number = NUMBERED.get(table)
    if number:
        rows, last = db.execute(f"SELECT COUNT(*), COALESCE(MAX({number}), 0) FROM {table}").fetchone()
        if rows != last:
            yield f"{table} has {rows} rows, the last of them is number {last}"
    key = number or "key"
    query = f"SELECT {key}, checksum, {COLUMNS[table]} FROM {table} ORDER BY {key}"
    wrong = [row[0] for row in db.execute(query) if checksum(repr(row[2:])) != row[1]]
    problems = [f"{table}, {key} {name}: not what was written (its checksum differs)" for name in wrong]
    yield from first_few(problems, f"rows of {table}")


def first_few(problems: Sequence[str], kind: str) -> Iterator[str]:
    """Yield the first `PROBLEMS_SHOWN` problems of a kind, then a count of the others."""
    yield from problems[:PROBLEMS_SHOWN]
    if len(problems) > PROBLEMS_SHOWN:
        yield f"... and {len(problems) - PROBLEMS_SHOWN} more {kind}"


def visit_row(v: Visit, step: int, version: int, now: float) -> tuple[Any, ...]:
    decision = int(v.verdict.keep), clean(v.verdict.reason), float(v.verdict.probability)
    return v.number, step, version, v.epoch, clean(v.prompt.id), v.prompt.ordinal, *decision, now


def _problem(r: Rollout) -> str:
    """Return what keeps a rollout from being booked, if anything."""
    if r.fate is None or r.fate == Fate.SKIPPED:
        return f"a finished rollout needs a fate other than skipped, got {r.fate}"
    if r.reward is not None and not math.isfinite(r.reward):
        return f"reward {r.reward} is not finite; a rollout without a usable reward is `failed`"
    if r.reward is not None and r.fate in (Fate.FAILED, Fate.PRUNED):
        return f"fate {r.fate} with reward {r.reward}; its reward must be None"
    if r.reward is None and r.fate == Fate.TRAINED:
        return "fate trained without a reward"
    return ""


SHORT = 64
"""Values up to which a list is faster than an array."""


def rollout_row(path: Path, visit: int, step: int, r: Rollout) -> tuple[Any, ...]:
    """Return the row of a finished rollout. Raises ValueError."""
    if problem := _problem(r):
        raise ValueError(f"{path}: visit {visit}, sibling {r.sibling}: {problem}.")
    assert r.fate is not None
    tokens = int(np.count_nonzero(r.action_mask))
    versions = r.versions if tokens == len(r.versions) else r.versions[r.action_mask]
    prompt_tokens = len(r.prompt_ids) + sum(len(segment.prompt_ids) for segment in r.later_segments)
    counts = prompt_tokens, tokens, len(r.token_ids) - tokens - r.abandoned_tokens
    reward = None if r.reward is None else float(r.reward)
    few = versions.tolist() if tokens < SHORT else [int(versions.min()), int(versions.max())]
    lag = (min(few), max(few)) if few else (None, None)
    rest = float(r.seconds), clean(r.stop_reason), float(r.survival_p)
    return visit, r.sibling, step, r.fate.value, clean(r.reason), *counts, reward, as_json(r.rewards), *lag, *rest


def as_json(values: Mapping[str, Any]) -> str:
    """Return canonical JSON of numbers; null for absent or non-finite ones."""
    entries = []
    for name in sorted(values):
        value = values[name]
        finite = value is not None and math.isfinite(value)
        entries.append(f"{_quoted(name)}: {float(value)!r}" if finite else f"{_quoted(name)}: null")
    return f"{{{', '.join(entries)}}}"


_quoted = lru_cache(maxsize=1_000)(json.dumps)


def clean(text: str) -> str:
    """Return text that SQLite can store: lone surrogates as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class Prefix:
    """Running SHA-256 over the checksums of valid rows, in booking order."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.last = self.rows = 0
        self._sha = hashlib.sha256()

    def extend(self, db: sqlite3.Connection, until: int | None = None) -> dict[str, Any]:
        bound = (1 << 63) - 1 if until is None else until
        query = f"SELECT row, checksum FROM {self.table} WHERE row > ? AND row <= ? AND void = 0 ORDER BY row"
        found = db.execute(query, (self.last, bound))
        while rows := found.fetchmany(4096):
            self._sha.update("".join(map(repr, rows)).encode())
            self.last = rows[-1][0]
            self.rows += len(rows)
        return {"last": self.last, "rows": self.rows, "sha256": self._sha.copy().hexdigest()}


def covered(mark: Mapping[str, Any], table: str) -> int:
    try:
        return int(mark[table]["last"])
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"not a mark of the ledger: no last row of {table!r} in {dict(mark)!r}.") from error


def differences(mark: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{table} has {got['rows']} of the {mark[table].get('rows')} rows"
        if mark[table].get("rows") != got["rows"]
        else f"the {got['rows']} rows of {table} have other contents"
        for table, got in found.items()
        if dict(mark[table]) != got
    ]
