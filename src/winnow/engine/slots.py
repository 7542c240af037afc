"""Running sequences in host arrays: row = slot; rows 0..n-1 run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np

from .base import Finished, Reached, Request

TOKEN, POSITION, COUNT, KEY, TOP_K, ALARM, STOP_SET = range(7)

Rows = slice | np.ndarray
"""Rows of a table: a slice, or int64 in any order."""
Cells = tuple[np.ndarray, np.ndarray]
"""Row and column of each of some cells."""


class Drawn(NamedTuple):
    """One token for each of N rows."""

    tokens_N: np.ndarray
    logp_N: np.ndarray
    raw_logp_N: np.ndarray | None

    def at(self, rows: Rows) -> Drawn:
        """Return some rows."""
        return Drawn(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: list[Drawn]) -> Drawn:
        """Return the rows of all parts; where some lack a column, as nobody asked for it, zeros."""
        columns = []
        for column in zip(*parts, strict=True):
            pieces = [np.zeros(len(parts[i][0])) if piece is None else piece for i, piece in enumerate(column)]
            columns.append(None if all(piece is None for piece in column) else np.concatenate(pieces))
        return cls(*columns)  # type: ignore[arg-type]


class SlotTable:
    """Vectorised state of the running sequences."""

    def __init__(self, slots: int) -> None:
        self.n = 0
        self.slots = slots
        self.ints = np.zeros((7, slots), dtype=np.int64)
        """TOKEN last sampled; POSITION it will be written to; COUNT sampled so far; KEY of the noise; TOP_K; ALARM, the
        next COUNT to check the row at; STOP_SET."""
        self.floats = np.ones((3, slots), dtype=np.float32)
        """Inverse temperature, top-p and min-p."""
        self.greedy = np.zeros(slots, dtype=bool)
        self.special = np.zeros(slots, dtype=bool)
        """Rows with more to do than to draw: greedy, filtered or penalized ones, and with requested extras."""
        self.penalty = np.ones(slots, dtype=np.float32)
        self.context = np.zeros((slots, 0), dtype=np.int64)
        """Prompt and sampled tokens of rows with a penalty; unused columns repeat the first token."""
        self.tokens = np.zeros((slots, 0), dtype=np.int64)
        self.logp = np.zeros((slots, 0), dtype=np.float32)
        self.weights = np.zeros((slots, 0), dtype=np.int32)
        """Load number of the weights that sampled each token."""
        self.raw_logp = np.zeros((slots, 0), dtype=np.float32)
        self.raw = np.zeros(slots, dtype=bool)
        """Rows with requested `raw_logp`."""
        self.num_reused_tokens = np.zeros(slots, dtype=np.int64)
        """Tokens among those sampled that took no decoding step of their own."""
        self.num_computed_tokens = np.zeros(slots, dtype=np.int64)
        """Positions that went through the model for each row."""
        self.counts_computed = True
        """Whether the engine counts them."""
        self.requests: list[Request] = []
        self.row_of: dict[Hashable, int] = {}
        self.clock = 0.0
        """Engine seconds per running row, summed over all steps so far."""
        self._clock_in = np.zeros(slots)
        self._index = np.arange(slots)

    def append(self, requests: list[Request], stop_sets: list[int]) -> slice:
        """Start sequences after the running ones; return their rows."""
        rows = slice(self.n, self.n + len(requests))
        self._widen(max(r.params.max_tokens for r in requests))
        greedy = [r.params.temperature == 0 for r in requests]
        self.ints[:, rows] = np.array(
            [
                (0, len(r.prompt_ids), 0, 0, 0 if g else r.params.top_k, _next_alarm(r, 0), stop_set)
                for r, g, stop_set in zip(requests, greedy, stop_sets, strict=True)
            ],
            dtype=np.int64,
        ).T
        self.ints[KEY, rows] = np.array([r.key for r in requests], np.uint64).view(np.int64)
        self.floats[:, rows] = np.array(
            [
                (1, 1, 0) if g else (1 / p.temperature, p.top_p, p.min_p)
                for p, g in zip((r.params for r in requests), greedy, strict=True)
            ]
        ).T
        self.greedy[rows] = greedy
        self._remember(rows, requests)
        self.raw[rows] = [r.raw_logp for r in requests]
        self.special[rows] = self.greedy[rows] | self.raw[rows] | (self.penalty[rows] != 1) | self.filtered(rows)
        self.num_reused_tokens[rows] = self.num_computed_tokens[rows] = 0
        self._clock_in[rows] = self.clock
        self.row_of.update(zip((r.id for r in requests), range(rows.start, rows.stop), strict=True))
        self.requests += requests
        self.n = rows.stop
        return rows

    def record(self, rows: Rows, drawn: Drawn, weights: int) -> np.ndarray:
        """Store one token per row; return which rows have reached their alarm's count (bool, in order)."""
        self._store((self._index[rows], self.ints[COUNT, rows]), drawn, weights)
        if self.special[rows].any() and (penalized := self.penalty[rows] != 1).any():
            some = self._index[rows][penalized]
            at = some, np.array([len(self.requests[row].prompt_ids) for row in some]) + self.ints[COUNT, some]
            self.context[at] = drawn.tokens_N[penalized]
        self.ints[TOKEN, rows] = drawn.tokens_N
        self.ints[COUNT, rows] += 1
        return np.asarray(self.ints[COUNT, rows] == self.ints[ALARM, rows])

    def accept(self, rows: np.ndarray, accepted: np.ndarray, at: Cells, drawn: Drawn, weights: int) -> None:
        """Store tokens of drafts, `accepted` of each new row, at rows and columns `at`."""
        self._store(at, drawn, weights)
        self.ints[COUNT, rows] = self.num_reused_tokens[rows] = accepted
        self.ints[POSITION, rows] += accepted

    def _store(self, at: Cells, drawn: Drawn, weights: int) -> None:
        """Store tokens at rows and columns."""
        self.tokens[at], self.logp[at], self.weights[at] = drawn.tokens_N, drawn.logp_N, weights
        if drawn.raw_logp_N is not None:
            self.raw_logp[at] = drawn.raw_logp_N

    def computed(self, tokens: Mapping[Hashable, int]) -> None:
        """Count positions that went through the model to start sequences."""
        for id_, n in tokens.items():
            self.num_computed_tokens[self.row_of[id_]] += n

    def rearm(self, row: int) -> None:
        """Set the alarm to the next count of `report_at` or the limit."""
        self.ints[ALARM, row] = _next_alarm(self.requests[row], int(self.ints[COUNT, row]))

    def sampled(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of a row's tokens and log-probabilities so far."""
        count = self.ints[COUNT, row]
        return self.tokens[row, :count], self.logp[row, :count]

    def transformed(self, rows: Rows) -> np.ndarray:
        """Return rows (bool) with a temperature, penalty or filter; others have the model's own `logp`."""
        return np.asarray((self.floats[0, rows] != 1) | (self.penalty[rows] != 1) | self.filtered(rows))

    def filtered(self, rows: Rows) -> np.ndarray:
        """Return rows (bool) with top-k, top-p or min-p."""
        _, top_p, min_p = self.floats[:, rows]
        return np.asarray((top_p < 1) | (min_p > 0) | (self.ints[TOP_K, rows] > 0))

    def _reported(self, row: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return copies of a row's log-probabilities so far, and of its raw ones if requested."""
        some = row, slice(int(self.ints[COUNT, row]))
        return self.logp[some].copy(), self.raw_logp[some].copy() if self.raw[row] else None

    def reached(self, row: int, hidden: np.ndarray) -> Reached:
        logp, raw_logp = self._reported(row)
        return Reached(self.requests[row].id, len(logp), logp, hidden, raw_logp, self.sampled(row)[0].copy())

    def finished(self, row: int, reason: str, versions: np.ndarray, hidden: np.ndarray | None = None) -> Finished:
        id_, tokens, seconds = self.requests[row].id, self.sampled(row)[0].copy(), self.clock - self._clock_in[row]
        logp, raw_logp = self._reported(row)
        computed = int(self.num_computed_tokens[row]) if self.counts_computed else None
        counts = int(self.num_reused_tokens[row]), computed
        return Finished(id_, tokens, logp, versions, reason, float(seconds), hidden, raw_logp, *counts)

    def remove(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows and fill the holes with the last rows; return the moves (targets, sources) for the cache."""
        rest = self.n - len(rows)
        gone = set(rows)
        targets = np.array(sorted(row for row in rows if row < rest), dtype=np.int64)
        sources = np.array([row for row in range(rest, self.n) if row not in gone], dtype=np.int64)
        for row in rows:
            del self.row_of[self.requests[row].id]
        self._move(targets, sources)
        self.n = rest
        del self.requests[self.n :]
        self.ints[[TOKEN, POSITION], self.n :] = 0
        return targets, sources

    def _move(self, targets: np.ndarray, sources: np.ndarray) -> None:
        for rows_last in (self.ints, self.floats):
            rows_last[:, targets] = rows_last[:, sources]
        flags, values = (self.greedy, self.special, self.raw), (self.logp, self.raw_logp)
        counts = self.num_reused_tokens, self.num_computed_tokens
        others = self.tokens, self.weights, self.penalty, self.context, self._clock_in
        for rows_first in (*flags, *values, *counts, *others):
            rows_first[targets] = rows_first[sources]
        moved = [self.requests[source] for source in sources]
        for target, request in zip(targets.tolist(), moved, strict=True):
            self.requests[target] = request
            self.row_of[request.id] = target

    def _remember(self, rows: slice, requests: list[Request]) -> None:
        """Store the penalties of new rows and the tokens that they apply to."""
        self.penalty[rows] = [r.params.repetition_penalty for r in requests]
        some = [(row, r) for row, r in enumerate(requests, rows.start) if r.params.repetition_penalty != 1]
        longest = max((len(r.prompt_ids) + r.params.max_tokens for _, r in some), default=0)
        if (extra := longest - self.context.shape[1]) > 0:
            first_N1 = self.context[:, :1] if self.context.shape[1] else np.zeros((self.slots, 1), np.int64)
            self.context = np.concatenate([self.context, np.repeat(first_N1, extra, 1)], 1)
        for row, r in some:
            self.context[row] = r.prompt_ids[0]
            self.context[row, : len(r.prompt_ids)] = r.prompt_ids

    def _widen(self, columns: int) -> None:
        extra = columns - self.tokens.shape[1]
        if extra > 0:
            for name in ("tokens", "logp", "weights", "raw_logp"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, extra))))


def _next_alarm(request: Request, count: int) -> int:
    limit = request.params.max_tokens
    return min([c for c in request.report_at if c > count] + [limit])
