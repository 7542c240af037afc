"""Write the rows of a ledger, each with a checksum, and detect damage to them."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..types import Fate, Rollout, Visit

SHOWN = 5
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
_INSERT = {
    table: f"INSERT INTO {table} ({columns}, checksum) VALUES ({', '.join('?' * (columns.count(',') + 2))})"
    for table, columns in COLUMNS.items()
}
_INSERT["meta"] += " ON CONFLICT (key) DO UPDATE SET value = excluded.value, checksum = excluded.checksum"

NUMBERED = {name: "row" for name in COLUMNS if name != "meta"} | {"restarts": "number"}
"""Tables whose rows are numbered from 1 and never deleted, with the column of the number."""


def insert(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add rows to a table; values are in the order of its columns."""
    stored = [tuple(value + 0.0 if isinstance(value, float) else value for value in row) for row in rows]  # no -0.0
    db.executemany(_INSERT[table], [(*row, checksum(row)) for row in stored])


def checksum(row: tuple[Any, ...]) -> int:
    """Return 64 bits over the contents of a row, without its number and `void`.

    Protects against damage, not forgery: anyone who can write the file can write its checksums.
    """
    return int.from_bytes(hashlib.blake2b(repr(row).encode(), digest_size=8).digest(), "little", signed=True)


def damaged_rows(db: sqlite3.Connection, table: str) -> Iterator[str]:
    """Yield missing rows of a table, and rows that are not as they were written."""
    number = NUMBERED.get(table)
    if number:
        rows, last = db.execute(f"SELECT COUNT(*), COALESCE(MAX({number}), 0) FROM {table}").fetchone()
        if rows != last:
            yield f"{table} has {rows} rows, the last of them is number {last}"
    key = number or "key"
    query = f"SELECT {key}, checksum, {COLUMNS[table]} FROM {table} ORDER BY {key}"
    wrong = [row[0] for row in db.execute(query) if checksum(row[2:]) != row[1]]
    problems = [f"{table}, {key} {name}: not what was written (its checksum differs)" for name in wrong]
    yield from first_few(problems, f"rows of {table}")


def first_few(problems: Sequence[str], kind: str) -> Iterator[str]:
    """Yield the first `SHOWN` problems of a kind, then a count of the others."""
    yield from problems[:SHOWN]
    if len(problems) > SHOWN:
        yield f"... and {len(problems) - SHOWN} more {kind}"


def visit_row(v: Visit, step: int, version: int, now: float) -> tuple[Any, ...]:
    decision = int(v.verdict.keep), clean(v.verdict.reason), float(v.verdict.probability)
    return v.number, step, version, v.epoch, clean(v.prompt.id), v.prompt.ordinal, *decision, now


def rollout_row(where: str, visit: int, step: int, r: Rollout) -> tuple[Any, ...]:
    where = f"{where}, sibling {r.sibling}"
    if r.fate is None or r.fate == Fate.SKIPPED:
        raise ValueError(f"{where}: a finished rollout needs a fate other than skipped, got {r.fate}.")
    if r.reward is not None and not math.isfinite(r.reward):
        raise ValueError(f"{where}: reward {r.reward} is not finite; a rollout without a usable reward is `failed`.")
    if r.reward is not None and r.fate in (Fate.FAILED, Fate.PRUNED):
        raise ValueError(f"{where}: fate {r.fate} with reward {r.reward}; its reward must be None.")
    if r.reward is None and r.fate == Fate.TRAINED:
        raise ValueError(f"{where}: fate trained without a reward.")
    versions = r.versions[r.action_mask]
    tokens = len(versions)
    counts = sum(len(segment.prompt_ids) for segment in r.segments), tokens, len(r.token_ids) - tokens
    reward = None if r.reward is None else float(r.reward)
    lag = (int(versions.min()), int(versions.max())) if tokens else (None, None)
    rest = float(r.seconds), r.stop_reason, float(r.survival_p)
    return visit, r.sibling, step, r.fate.value, clean(r.reason), *counts, reward, as_json(r.rewards), *lag, *rest


def as_json(values: Mapping[str, Any]) -> str:
    """Return canonical JSON of numbers; null for absent or non-finite ones."""
    finite = {k: float(v) if v is not None and math.isfinite(v) else None for k, v in values.items()}
    return json.dumps(finite, sort_keys=True)


def clean(text: str) -> str:
    """Return text that SQLite can store: lone surrogates as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
