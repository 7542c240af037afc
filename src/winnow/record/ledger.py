"""The ledger: the fate of every visit, rollout, token and second of a run.

One SQLite file, append-only. A visit is booked when it is dispatched (or skipped), its outcome and rollouts when its
group is done, and every optimizer step once. Rows are never deleted, and only `void` ever changes: a row that a crash
invalidates gets the number of the restart that voided it (0 while the row counts).

Invariants, enforced by the schema and proved from the file alone by `verify`: every visit number is booked once and has
at most one outcome; a (visit, sibling) is booked once; every unfinished visit is in flight.

The fate of a visit is that of the member that got furthest: trained, stale, surplus, filtered, cut, pruned, failed.
The column `zero_variance` of an outcome is the judge's kind of the group: `easy`, `hard` or `unknown` without a signal,
`none` with one, NULL if not judged. Until a run sets its judge, rewards equal within 1e-8 mean no signal, and a reward
of 1 is right.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.failpoint import failpoint
from ..base.files import from_json, fsync
from ..methods.group_kind import BY_REWARDS
from ..types import Fate, Group, GroupKind, Rollout, Visit
from .ledger_file import (
    COLUMNS,
    UNREADABLE,
    LedgerError,
    Prefix,
    as_json,
    clean,
    covered,
    damaged,
    damaged_rows,
    differences,
    insert,
    insert_stored,
    open_file,
    rollout_row,
    stored,
    visit_row,
)
from .proof import BY_GAP, FAILURES, PROBE, Proof, group_fate, probed, totals, verify

_ORDER = {
    "visits": "visit",
    "outcomes": "visit",
    "rollouts": "visit, sibling",
    "steps": "step",
    "evaluations": "step, rollouts, tokens",
}
"""Tables in which a resumed and an uninterrupted run must agree in all but wall-clock columns, and their order."""
_WALL_CLOCK = ("seconds", "time")
WAIT_S = 1.0
"""Seconds after which a group that finishes is written at once, with those that wait for it."""

TABLES = tuple(_ORDER)


class Ledger:
    """The account of one run. Not thread-safe; other processes may read it at the same time."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Use `Ledger.open`."""
        self.path = path
        self._db = connection
        self._prefix: dict[str, Prefix] = {}
        self._open: set[int] = set()
        """Visits known to be in flight."""
        self._ended: dict[str, list[tuple[Any, ...]]] = {"outcomes": [], "rollouts": []}
        """Rows that the next read or write stores first."""
        self._ended_since = 0.0
        self.judge = BY_REWARDS

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, read_only: bool = False) -> Ledger:
        """Open the ledger at `path`, or create it. `read_only` never writes: safe while a run writes.

        Raises FileNotFoundError (read-only and absent) and LedgerError (no ledger, damaged, of another version).
        """
        return cls(Path(path), open_file(Path(path), read_only))

    def close(self) -> None:
        try:
            self._write_ended()
        finally:
            self._ended = {table: [] for table in self._ended}
            self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def get_meta(self, key: str) -> str | None:
        """Return a string about the run, if it is known: `max_lag`, `success`, `saved`, `finished` ("true"),
        `hosted` ("true": a run inside TRL or verl), and `fingerprints` (JSON)."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def set_meta(self, key: str, value: str) -> None:
        with self._transaction() as db:
            insert(db, "meta", [(key, value)])

    def visit(self, visits: Sequence[Visit], *, step: int, version: int) -> None:
        """Book visits as dispatched (in flight from now on), or as skipped if their verdict says so.

        `step` is the current optimizer step, `version` the policy version of the engine.
        Raises ValueError, and books nothing, when a visit number is already booked.
        """
        now = time.time()
        dispatched = [visit_row(v, step, version, now) for v in visits]
        removed = [v for v in visits if not v.verdict.keep]
        skipped = [(v.number, step, Fate.SKIPPED.value, clean(v.verdict.reason), 0, None, None, now) for v in removed]
        try:
            with self._transaction() as db:
                insert(db, "visits", dispatched)
                insert(db, "outcomes", skipped)
        except sqlite3.IntegrityError as error:
            twice = self._booked_twice([v.number for v in visits])
            raise ValueError(f"{self.path}: step {step}: {twice}") from error
        self._open.update(v.number for v in visits if v.verdict.keep)

    def finish(self, group: Group, *, step: int) -> None:
        """Book the fate of a group and of each of its rollouts; `step` is the one that trained it, else the current.

        They are written with the next visits, step or read, and with the first group that finishes over a second later.
        What a killed process had not written is in flight. Raises ValueError, and books nothing, on: no rollouts, a
        rollout without a fate, a duplicate sibling, an unknown or finished visit, a reward that is not finite or that
        its fate excludes.
        """
        number = group.visit.number
        where = f"{self.path}: visit {number}"
        rows = [rollout_row(self.path, number, step, r) for r in group.rollouts]
        fate = group_fate([row[3] for row in rows]) if rows else None
        if fate is None:
            raise ValueError(f"{where}: a group without rollouts cannot be finished.")
        if len({row[1] for row in rows}) < len(rows):
            raise ValueError(f"{where}: the same sibling twice in {sorted(r.sibling for r in group.rollouts)}.")
        rewards = group.known_rewards()
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        kind = _zero_variance(self.judge.kind(group))
        reason = next((r.reason for r in group.rollouts if r.fate == fate and r.reason), group.verdict.reason)
        if number not in self._open:
            self._open = set(self.in_flight())
        if number not in self._open:
            raise ValueError(f"{where}: {self._outcome(number)}.")
        self._open.remove(number)
        now = time.time()
        if not self._ended["outcomes"]:
            self._ended_since = now
        self._ended["outcomes"].append(stored((number, step, fate, clean(reason), len(rows), mean, kind, now)))
        self._ended["rollouts"] += map(stored, rows)
        if not 0 <= now - self._ended_since < WAIT_S:
            self._write_ended()

    def step(
        self, step: int, *, seconds: Mapping[str, float], metrics: Mapping[str, float], version: int | None = None
    ) -> None:
        """Book an optimizer step, skipped ones included.

        `seconds` by phase (generate, reward, update, publish, evaluate, checkpoint, idle ...). `version`: policy
        version before the update, against which `verify` checks the lag bound; default: the newest version of a
        dispatched visit. Raises ValueError on a step booked before.
        """
        negative = {k: s for k, s in seconds.items() if not s >= 0 or not math.isfinite(s)}
        if negative:
            raise ValueError(f"step {step}: seconds must be finite and not negative, got {negative}.")
        with self._transaction() as db:
            try:
                insert(db, "steps", [(step, version, as_json(seconds), as_json(metrics), time.time())])
            except sqlite3.IntegrityError as error:
                raise ValueError(f"{self.path}: step {step}: already booked.") from error
            failpoint("ledger.step")

    def evaluation(self, step: int, rollouts: int, tokens: int, seconds: float) -> None:
        """Book the cost of an evaluation; its rollouts have no fate."""
        with self._transaction() as db:
            insert(db, "evaluations", [(step, int(rollouts), int(tokens), float(seconds), time.time())])

    def probes(self, rollouts: Sequence[Rollout]) -> None:
        """Book rollouts of a comparison of engine and learner: no fate, no step, never voided.

        They are in the meta table because a resume compares again, and must not add rows.
        """
        with self._transaction() as db:
            sums = probed(db)
            sums["rollouts"] += len(rollouts)
            sums["tokens"] += sum(int(rollout.action_mask.sum()) for rollout in rollouts)
            sums["seconds"] += sum(rollout.seconds for rollout in rollouts)
            insert(db, "meta", [(PROBE, as_json(sums))])

    def mark(self) -> dict[str, Any]:
        """Return the cut for a checkpoint, durable on return: by table last row, valid rows, and their SHA-256.

        JSON values. Reads only rows booked since the last mark.
        """
        self._db.execute("PRAGMA synchronous = FULL")  # makes the commit below fsync everything before it
        self.set_meta("marks", str(int(self.get_meta("marks") or 0) + 1))
        failpoint("ledger.mark")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        fsync(self.path.parent)
        return {table: self._prefix.setdefault(table, Prefix(table)).extend(self._db) for table in TABLES}

    def rollback(self, mark: Mapping[str, Any], *, reason: str) -> dict[str, Any]:
        """Void every row after `mark`, in one transaction; visits in flight at the mark are in flight again.

        Returns `restart` (its number), `voided` (rows by table) and `in_flight` (visit numbers to relaunch; they stay
        booked). Raises LedgerError, and voids nothing, when rows up to the mark are not intact.
        """
        with self._reading():
            self._refuse_damage()
            prefixes, found = self._up_to(mark)
        if wrong := differences(mark, found):
            raise LedgerError(
                f"{self.path}: the ledger is not the one this checkpoint was saved with: {'; '.join(wrong)}. "
                "Resume from another checkpoint, or restore the ledger that belongs to this one."
            )
        with self._transaction() as db:
            number = db.execute("SELECT COUNT(*) FROM restarts").fetchone()[0] + 1
            voided = {
                table: db.execute(
                    f"UPDATE {table} SET void = ? WHERE row > ? AND void = 0", (number, found[table]["last"])
                ).rowcount
                for table in TABLES
            }
            insert(db, "restarts", [(number, clean(reason), as_json(voided), time.time())])
            insert(db, "meta", [("finished", "false")])
            failpoint("ledger.rollback")
        self._prefix, self._open = prefixes, set()
        return {"restart": number, "voided": voided, "in_flight": self.in_flight()}

    def in_flight(self) -> list[int]:
        """Return the numbers of visits dispatched and not finished, ascending."""
        with self._reading() as db:
            return [row[0] for row in db.execute("SELECT visit FROM visit_fates WHERE fate IS NULL ORDER BY visit")]

    def totals(self) -> dict[str, dict[str, float]]:
        """Sum `visits, rollouts, prompt_tokens, tokens, seconds` by fate, `in_flight`, `void`, `evaluation`, `probe`.

        Tokens are sampled ones; seconds are shares of the engine's wall clock. A visit counts under its group's fate, a
        rollout under its own. `unrewarded` has the tokens of trained rollouts that agents without a reward sampled,
        `abandoned` those of answers that an agent had given up.
        """
        with self._reading() as db:
            return totals(db)

    def failures(self) -> list[tuple[str, str, int]]:
        """Return reason, prompt id and count of failed rollouts, in booking order."""
        self._write_ended()
        return self._db.execute(FAILURES).fetchall()

    def stop_reasons(self) -> dict[str, int]:
        """Count rollouts by stop reason, the most frequent first."""
        self._write_ended()
        query = "SELECT stop_reason, COUNT(*) FROM rollouts WHERE void = 0 GROUP BY 1 ORDER BY 2 DESC, 1"
        return dict(self._db.execute(query).fetchall())

    def digest(self) -> str:
        """Return a SHA-256 of all valid rows: equal for a resumed and an uninterrupted run.

        Wall times are left out, and how much was computed, which depends on when an agent's program asks.
        """
        sha = hashlib.sha256()
        with self._reading() as db:
            for table, order in _ORDER.items():
                sha.update(table.encode())
                columns = [name for name in COLUMNS[table].split(", ") if name not in _WALL_CLOCK]
                for row in db.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE void = 0 ORDER BY {order}"):
                    sha.update(repr(_without_costs(row) if table == "steps" else row).encode())
        return sha.hexdigest()

    def verify(self, marks: Mapping[str, Mapping[str, Any]] | None = None) -> Proof:
        """Prove exactly-once accounting from the file alone; see `winnow.record.proof.verify`.

        `marks`: those of checkpoints, by name; a mark that does not match the ledger is a problem.
        Raises LedgerError on a damaged ledger: a changed or missing row.
        """
        with self._reading() as db:
            self._refuse_damage()
            proof = verify(db)
            problems = [
                f"not the ledger that {name} was saved with: {difference}"
                for name, mark in (marks or {}).items()
                for difference in differences(mark, self._up_to(mark)[1])
            ]
        return replace(proof, ok=proof.ok and not problems, problems=[*problems, *proof.problems])

    def recurrence(self) -> list[tuple[int, int, int]]:
        """Return how often zero-variance prompts repeat, by epochs between; see `winnow.record.proof.BY_GAP`."""
        with self._reading() as db:
            return db.execute(BY_GAP).fetchall()

    def _refuse_damage(self) -> None:
        """Raise LedgerError on changed and missing rows; some 7 s for a million rollouts.

        Opening the ledger has checked the structure of the file.
        """
        found = [problem for table in COLUMNS for problem in damaged_rows(self._db, table)]
        if found:
            raise LedgerError(damaged(self.path, "; ".join(found)))

    def _up_to(self, mark: Mapping[str, Any]) -> tuple[dict[str, Prefix], dict[str, dict[str, Any]]]:
        """Return the rows that `mark` covers, and a new mark of those rows."""
        prefixes = {table: Prefix(table) for table in TABLES}
        return prefixes, {t: prefix.extend(self._db, until=covered(mark, t)) for t, prefix in prefixes.items()}

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Read one state of the ledger, even while another process writes. Raises LedgerError on damage."""
        self._write_ended()
        try:
            self._db.execute("BEGIN")
            yield self._db
        except UNREADABLE as error:
            raise LedgerError(damaged(self.path, error)) from error
        finally:
            self._undo()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise LedgerError(f"{self.path}: cannot write: {error}. Is another process using this run?") from error
        try:
            self._insert_ended()
            yield self._db
            self._commit()
        except sqlite3.OperationalError as error:
            self._undo()
            raise LedgerError(f"{self.path}: cannot write: {error}. Is the disk full or read-only?") from error
        except BaseException:
            self._undo()
            raise

    def _insert_ended(self) -> None:
        try:
            for table, rows in self._ended.items():
                insert_stored(self._db, table, rows)
        except sqlite3.IntegrityError as error:
            raise LedgerError(
                f"{self.path}: another process has booked what this one did ({error}); let one run use a run directory"
            ) from error

    def _commit(self) -> None:
        ended, self._ended = self._ended, {table: [] for table in self._ended}
        try:
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction or isinstance(error, sqlite3.Error):  # else an interrupt after the commit
                self._ended = ended
            raise

    def _write_ended(self) -> None:
        if self._ended["outcomes"]:
            with self._transaction():
                pass

    def _undo(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _booked_twice(self, numbers: Sequence[int]) -> str:
        known = {row[0] for row in self._db.execute("SELECT visit FROM visits WHERE void = 0")}
        twice = sorted({n for n in numbers if n in known or numbers.count(n) > 1})
        return f"visit {', '.join(map(str, twice))} booked before; visit numbers are used once."

    def _outcome(self, number: int) -> str:
        """Return why a visit cannot be finished."""
        query = "SELECT fate, step FROM outcomes WHERE visit = ? AND void = 0"
        known = self._db.execute(query, (number,)).fetchone()
        if known is None:
            return "never dispatched; book it with visit() first"
        return f"already finished; its fate is {known[0]}, since step {known[1]}"


def _zero_variance(kind: GroupKind) -> str | None:
    """Return the value of the column `zero_variance`."""
    return {GroupKind.SIGNAL: "none", GroupKind.NOT_JUDGED: None}.get(kind, kind.value)


def _without_costs(row: tuple[Any, ...]) -> tuple[Any, ...]:
    step, version, metrics = row
    return step, version, sorted((k, v) for k, v in from_json(metrics).items() if not _is_cost(k))


def _is_cost(key: str) -> bool:
    return "second" in key or key.endswith(("_time", "_wait_s")) or key == "num_computed_tokens"
