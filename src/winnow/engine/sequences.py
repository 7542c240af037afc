"""Shared parts of engines: waiting requests, running sequences, drawing tokens, and ending sequences.

An engine computes hidden states and logits. Everything else is here, so that all engines report and sample the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..base.noise import uniform_array
from ..base.token_filters import penalized, seen
from . import slots as col
from .base import CAPABILITIES, Event, Finished, Request, check_request
from .facts import Facts
from .sampling import Transform, raw_logp, sample
from .slots import Drawn, Rows, SlotTable
from .stops import StopTable


class Sequences:
    """Waiting and running sequences of an engine; the running ones are the rows of `table`."""

    def __init__(self, facts: Facts, tokenizer: Any, slots: int, device: torch.device) -> None:
        self.facts = facts
        self.table = SlotTable(slots)
        self.waiting: dict[Hashable, Request] = {}
        self.clock = 0
        self.sample = sample
        self._stops = StopTable(tokenizer, facts.vocab_size, facts.eos_ids)
        self._device = device
        self._versions = np.zeros(1, dtype=np.int32)
        """Policy version of every weight load so far, by load number."""
        self._failure: str | None = None

    @property
    def version(self) -> int:
        return int(self._versions[-1])

    @property
    def pending(self) -> int:
        return len(self.waiting) + self.table.n

    # ---- in and out --------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> list[Request]:
        """Queue all requests, or raise and queue no request. Raises ValueError as `Engine.submit` does."""
        self.require_alive()
        new: dict[Hashable, Request] = {}
        checked: tuple[Any, ...] = ()
        for request in requests:
            if request.id in new or request.id in self.waiting or request.id in self.table.row_of:
                raise ValueError(f"request id {request.id!r} is already in use")
            if (what := (request.prompt_ids, request.params, request.draft, request.report_at)) != checked:
                check_request(request, self.facts.vocab_size, self.facts.max_length)
                checked = what  # siblings ask for the same
            new[request.id] = request
        if not self.waiting and not self.table.n:
            self._stops.forget()
        for request in new.values():
            self._stops.add(request.params.stop)
        self.waiting.update(new)
        return list(new.values())

    def start(self, requests: list[Request]) -> slice:
        """Move requests from the queue to the end of the running rows; return their rows."""
        if not requests:
            return slice(self.table.n, self.table.n)
        for request in requests:
            del self.waiting[request.id]
        return self.table.append(requests, [self._stops.add(r.params.stop) for r in requests])

    def cancelled(self, ids: Iterable[Hashable]) -> tuple[list[Finished], list[Request], list[int]]:
        """Return (Finished events, requests that were waiting, rows that the engine must still remove)."""
        self.require_alive()
        events, left, rows = [], [], []
        for id_ in dict.fromkeys(ids):
            if id_ in self.waiting:
                left.append(self.waiting.pop(id_))
                empty = np.zeros(0)
                args = empty.astype(np.int64), empty.astype(np.float32), empty.astype(np.int32)
                events.append(Finished(id_, *args, "cancelled", 0.0, num_computed_tokens=0))
            elif id_ in self.table.row_of:
                rows.append(self.table.row_of[id_])
                events.append(self._finished(rows[-1], "cancelled", None))
        return events, left, rows

    def remove(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows; return the moves (targets, sources) that closed the holes. An idle engine forgets old versions."""
        moves = self.table.remove(rows)
        if not self.pending:
            self._versions = self._versions[-1:]
        return moves

    def loaded(self, version: int) -> None:
        """Attribute later tokens to new weights with this version."""
        self._versions = np.append(self._versions if self.pending else [], version).astype(np.int32)

    def unchanged(self, row: int) -> bool:
        """Return whether the current weights have sampled all tokens of the row."""
        return int(self.table.weights[row, 0]) == len(self._versions) - 1

    # ---- a step ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the engine as failed if the block raises; later calls report the error."""
        self.require_alive()
        try:
            yield
        except BaseException as error:
            self._failure = f"failed earlier and cannot go on ({type(error).__name__}: {error})"
            raise

    def draw(self, logits_NV: torch.Tensor, rows: Rows, counts_N: np.ndarray | None = None) -> Drawn:
        """Return the next token of each row, from logits over the sampled vocabulary. Stores nothing.

        `counts_N`: number of the token to draw of each of an array of rows; None: the next one.
        """
        table = self.table
        counts_N = table.ints[col.COUNT, rows] if counts_N is None else counts_N
        uniform_N = self.to_device(uniform_array(table.ints[col.KEY, rows], counts_N))
        floats = self.to_device(table.floats[:, rows])
        if not table.special[rows].any():
            tokens_N, logp_N = self.sample(logits_NV, uniform_N, Transform(floats[0], None, None, None, None))
            return self._on_host(tokens_N, logp_N, None)
        greedy = self.to_device(table.greedy[rows]) if table.greedy[rows].any() else None
        filtered = table.filtered(rows).any()
        filters = (self.to_device(table.ints[col.TOP_K, rows]), *floats[1:]) if filtered else (None, None, None)
        transform = Transform(floats[0], greedy, *filters)
        drawn_from_NV = logits_NV
        if (table.penalty[rows] != 1).any():
            seen_NV = seen(self.to_device(table.context[rows]), logits_NV.shape[1])
            drawn_from_NV = penalized(logits_NV.float(), seen_NV, self.to_device(table.penalty[rows])[:, None])
        tokens_N, logp_N = self.sample(drawn_from_NV, uniform_N, transform)
        raw_logp_N = logp_N if table.raw[rows].any() else None
        if (changed_N := table.transformed(rows))[table.raw[rows]].any():
            raw_logp_N = torch.where(self.to_device(changed_N), raw_logp(logits_NV, tokens_N), logp_N)
        return self._on_host(tokens_N, logp_N, raw_logp_N)

    def _on_host(self, *columns: torch.Tensor | None) -> Drawn:
        if self._device.type == "cpu":
            return Drawn(*(None if column is None else column.numpy() for column in columns))  # type: ignore[arg-type]
        given = [column.double() for column in columns if column is not None]
        tokens, logp, *raw = torch.stack(given).cpu().numpy()  # one copy and one sync
        return Drawn(tokens.astype(np.int64), logp.astype(np.float32), raw[0].astype(np.float32) if raw else None)

    def accept(self, rows: np.ndarray, lengths: np.ndarray, draft_N: np.ndarray, drawn: Drawn) -> np.ndarray:
        """Store what new rows draw of their drafts, up to the first other token; return how many tokens of each.

        `draft_N`, `drawn`: `lengths` tokens of each row, row by row. The next step draws a token that ends the
        sequence or is to be reported.
        """
        starts, table = np.cumsum(lengths) - lengths, self.table
        row_N = np.repeat(rows, lengths)
        count_N = np.arange(len(row_N)) - np.repeat(starts, lengths)
        set_N = table.ints[col.STOP_SET, row_N]
        stays_N = (drawn.tokens_N == draft_N) & (count_N < table.ints[col.ALARM, row_N] - 1)
        for i in np.flatnonzero(stays_N & self._stops.alert[set_N, draft_N]).tolist():
            stays_N[i] = not self._end(int(set_N[i]), draft_N[i - count_N[i] : i + 1])
        accepted = np.minimum.reduceat(np.where(stays_N, np.repeat(lengths, lengths), count_N), starts)
        kept = np.flatnonzero(count_N < np.repeat(accepted, lengths))
        table.accept(rows, accepted, (row_N[kept], count_N[kept]), drawn.at(kept), len(self._versions) - 1)
        return accepted

    def record(self, rows: Rows, drawn: Drawn) -> np.ndarray:
        """Store a token per row; return whether `check` must look at it: bool, in the order of `rows`.

        Raises FloatingPointError when the weights have diverged.
        """
        table = self.table
        alarms = table.record(rows, drawn, len(self._versions) - 1)
        self.clock += 1
        if not np.isfinite(drawn.logp_N).all():
            row = int(np.arange(table.slots)[rows][~np.isfinite(drawn.logp_N)][0])
            raise FloatingPointError(
                f"request {table.requests[row].id!r}: logits are not finite at token {table.ints[col.COUNT, row]} "
                f"(policy version {self.version}); the weights have diverged"
            )
        return alarms | self._stops.alert[table.ints[col.STOP_SET, rows], drawn.tokens_N]

    def check(self, rows: list[int], hidden_of: Callable[[list[int]], torch.Tensor]) -> tuple[list[Event], list[int]]:
        """Check rows with a possible stop or report; return events and the rows that have ended.

        `hidden_of(rows)`: [len(rows), H], the states that their last tokens were drawn from.
        """
        events: list[Event] = []
        reasons = {row: self._stop_reason(row) for row in rows}
        shown = [row for row in rows if self._shows_hidden(row, reasons[row])]
        hidden = dict(zip(shown, hidden_of(shown).float().cpu().numpy(), strict=True)) if shown else {}
        for row, reason in reasons.items():
            if reason:
                events.append(self._finished(row, reason, hidden.get(row)))
                continue
            if row in hidden:
                events.append(self.table.reached(row, hidden[row]))
            self.table.rearm(row)
        return events, [row for row, reason in reasons.items() if reason]

    def _shows_hidden(self, row: int, reason: str) -> bool:
        request = self.table.requests[row]
        return request.last_hidden if reason else int(self.table.ints[col.COUNT, row]) in request.report_at

    def _stop_reason(self, row: int) -> str:
        tokens, _ = self.table.sampled(row)
        if end := self._end(int(self.table.ints[col.STOP_SET, row]), tokens):
            return end
        return "length" if len(tokens) == self.table.requests[row].params.max_tokens else ""

    def _end(self, stop_set: int, tokens: np.ndarray) -> str:
        """Return why a sequence ends with the last of these tokens; empty: it does not."""
        if int(tokens[-1]) in self._stops.eos_ids:
            return "eos"
        completed = self._stops.alert[stop_set, tokens[-1]] and self._stops.completed(stop_set, tokens)
        return "stop" if completed else ""

    def _finished(self, row: int, reason: str, hidden: np.ndarray | None) -> Finished:
        weights = self.table.weights[row, : self.table.ints[col.COUNT, row]]
        return self.table.finished(row, reason, self._versions[weights], hidden)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Return it on the device, on a CPU the array itself. The host does not wait: a GPU reads pinned memory when
        the copy is due."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def require_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine {self._failure}; build a new one")

    def close(self) -> None:
        """Refuse all later calls, and drop what was to be sampled."""
        self._failure = "is closed"
        self.waiting.clear()
        self.remove(list(range(self.table.n)))


class SequenceEngine:
    """Base of every engine over `Sequences`. Subclasses add `load_weights` and `_step`."""

    provides = frozenset(CAPABILITIES) - {"adapters", "drafts"}
    sequences: Sequences

    @property
    def version(self) -> int:
        return self.sequences.version

    @property
    def clock(self) -> int:
        return self.sequences.clock

    @property
    def pending(self) -> int:
        return self.sequences.pending

    @property
    def max_length(self) -> int | None:
        return self.sequences.facts.max_length

    def submit(self, requests: Iterable[Request]) -> None:
        self.sequences.submit(requests)

    def cancel(self, ids: Iterable[Hashable]) -> list[Finished]:
        events, _, rows = self.sequences.cancelled(ids)
        self._remove(rows)
        return events

    @torch.inference_mode()
    def step(self) -> list[Event]:
        with self.sequences.step():
            return self._step() if self.pending else []

    def _step(self) -> list[Event]:
        """Sample one token for every running sequence. Called only with running or waiting sequences."""
        raise NotImplementedError

    def _remove(self, rows: list[int]) -> None:
        """Drop rows of the table; override if the engine stores more per row."""
        self.sequences.remove(rows)
