"""The embedded engine: continuous batching over a Hugging Face causal LM, in the caller's process.

A step decodes one token of every running row, starts waiting requests in the free slots (siblings share one prefill
of their prompt), and samples for all of them. Sequences live in the first n slots; whoever ends gives way to the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ...base.noise import uniform
from ...base.weights import Weights, state_of
from ..base import CAPABILITIES, Event, Finished, Request, SamplingParams
from ..loading import ModelReference
from . import slots as col
from .backend import Output, Prefilled, check_state
from .cache import Chunk, KVCache, padded, plan
from .kept import Kept, KeptSequences
from .models import DTYPES, eos_ids, fixed_columns, longest, make_backend, tied_names
from .requests import check_report_at, check_request
from .sampling import Rows, confidence, raw_logp, sample
from .slots import SlotTable, Stopwatch
from .stops import StopTable
from .versions import Versions

T = TypeVar("T")

PREFILL_TOKENS = 16_384
"""Prompt tokens of one prefill, padding included."""
FIXED_ROWS = 32
"""With fixed slots, rows computed are a multiple of this."""
SORT_COST = 16
"""Rows are sorted once attention has read this many times the cache in padding; measured on CPU."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The embedded engine: continuous batching in this process over any Hugging Face causal LM with a KV cache."""

    slots: int = 256
    """Sequences that run at once."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None is the model's."""
    fixed_slots: bool = False
    """Compute every slot and column in every forward pass: slower, but results do not depend on what else runs."""
    max_length: int | None = None
    """Longest prompt plus completion; None is the model's limit."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, not {self.slots}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)} or None, not {self.dtype!r}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, not {self.max_length}")

    def build(self, model: ModelReference, tokenizer: Any) -> LocalEngine:
        return LocalEngine(model.load(), tokenizer, device=model.device, **asdict(self))


@dataclass(slots=True)
class _Prompt:
    """A prompt some request still waits for; its prefill is kept until the last of them is in."""

    waiting: int = 0
    prefilled: Prefilled | None = None
    index: int = 0


class LocalEngine:
    """Implements `winnow.engine.base.Engine`. Not thread-safe."""

    provides = frozenset(CAPABILITIES)

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        slots: int = 256,
        dtype: str | torch.dtype | None = None,
        fixed_slots: bool = False,
        max_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Copies the weights of `model` (a `transformers` causal LM), which stays the caller's.

        `device` defaults to the model's. Raises ValueError for a model that has no ordinary KV cache.
        """
        name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        self.options = LocalOptions(slots, name, fixed_slots, max_length)
        self.version = 0
        self._max_length = longest(model, max_length)
        self._backend = make_backend(model, tokenizer, self._max_length, name, device)
        self._expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._tied = tied_names(model)
        # Element-wise kernels compute what is left over after whole vectors in another way: leave nothing over.
        rows = -(-slots // FIXED_ROWS) * FIXED_ROWS if fixed_slots else slots
        self._cache = KVCache(self._backend.kv_shapes, rows, self._backend.dtype, self._backend.device)
        self._column_size = sum(h * s for shapes in self._backend.kv_shapes[:1] for h, s in shapes) // 2
        if fixed_slots:
            self._cache.reserve(fixed_columns(self._max_length))
        self._table = SlotTable(rows)
        self._stops = StopTable(
            tokenizer, self._backend.vocab_size, eos_ids(model, tokenizer, self._backend.vocab_size)
        )
        self._waiting: dict[Hashable, Request] = {}
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        # With fixed slots nothing may depend on what else runs, so not on what had to make room either.
        self._kept = KeptSequences(0 if fixed_slots else slots)
        self.clock = 0
        self._versions = Versions()
        self._waste = 0
        self._failure: str | None = None

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> LocalEngine:
        """Engine over a Hugging Face directory or hub name; runs no code from it. Options as in `__init__`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
        return cls(model, AutoTokenizer.from_pretrained(path, trust_remote_code=False), **options)

    @property
    def dtype(self) -> str:
        """Type of weights, keys and values."""
        return str(self._backend.dtype).removeprefix("torch.")

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position."""
        return sum(h * s for shapes in self._backend.kv_shapes for h, s in shapes) * self._backend.dtype.itemsize

    @property
    def pending(self) -> int:
        return len(self._waiting) + self._table.n

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        self._require_alive()
        new: dict[Hashable, Request] = {}
        checked: set[tuple[tuple[int, ...], SamplingParams]] = set()
        for request in requests:
            if request.id in new or request.id in self._waiting or request.id in self._table.row_of:
                raise ValueError(f"request id {request.id!r} is already in use")
            kind = (request.prompt_ids, request.params)
            if kind not in checked:
                check_request(request, self._backend.vocab_size, self._max_length)
                checked.add(kind)
            check_report_at(request)
            new[request.id] = request
        for request in new.values():
            self._stops.add(request.params.stop)
            self._prompts.setdefault(request.prompt_ids, _Prompt()).waiting += 1
        self._waiting.update(new)

    def cancel(self, ids: Iterable[Hashable]) -> list[Finished]:
        self._require_alive()
        events, rows = [], []
        for id_ in dict.fromkeys(ids):
            self._kept.forget(id_)
            if id_ in self._waiting:
                self._leave_queue(self._waiting.pop(id_))
                empty = np.zeros(0)
                args = empty.astype(np.int64), empty.astype(np.float32), empty.astype(np.int32)
                events.append(Finished(id_, *args, "cancelled", 0.0))
            elif id_ in self._table.row_of:
                rows.append(self._table.row_of[id_])
                events.append(self._finished(rows[-1], "cancelled"))
        self._remove(rows)
        return events

    def _leave_queue(self, request: Request) -> _Prompt:
        prompt = self._prompts[request.prompt_ids]
        prompt.waiting -= 1
        if not prompt.waiting:
            del self._prompts[request.prompt_ids]
        return prompt

    # ---- weights -----------------------------------------------------------------------------------------------

    def load_weights(self, weights: Weights, version: int) -> None:
        self._require_alive()
        self._backend.load(check_state(state_of(weights), self._expected, self._tied))
        for prompt in self._prompts.values():
            prompt.prefilled = None  # computed by the old weights, and no running row needs it
        self._kept.clear()
        self.version = version
        self._versions.swap(self.clock, version, self._table.ints[col.BORN, : self._table.n].min(initial=self.clock))

    def _finished(self, row: int, reason: str, hidden: np.ndarray | None = None) -> Finished:
        versions = self._versions.of(*self._table.ints[[col.BORN, col.COUNT], row])
        return self._table.finished(row, reason, versions, hidden)

    # ---- one step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        self._require_alive()
        if not self.pending:
            return []
        try:
            return self._step()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _step(self) -> list[Event]:
        watch, table = Stopwatch(), self._table
        outputs = [self._decode()] if table.n else []
        outputs += self._admit()
        output = outputs[0] if len(outputs) == 1 else _concatenate(outputs)
        tokens_N, logp_N, *extras = self._sample(output.logits_NV)
        alarms = table.record(tokens_N, logp_N, *extras)
        self.clock += 1
        table.clock += watch.lap() / table.n
        if not np.isfinite(logp_N).all():
            row = int(np.flatnonzero(~np.isfinite(logp_N))[0])
            raise FloatingPointError(
                f"request {table.requests[row].id!r}: logits are not finite at token {table.ints[col.COUNT, row]} "
                f"(policy version {self.version}); the weights have diverged"
            )
        alarms |= self._stops.alert[table.ints[col.STOP_SET, : table.n], tokens_N]
        events = self._settle(np.flatnonzero(alarms).tolist(), output.hidden_NH)
        table.clock += watch.lap() / max(table.n, 1)
        return events

    def _decode(self) -> Output:
        """Feed the last token of every running row."""
        table, n = self._table, self._table.n
        if self.options.fixed_slots:
            rows, chunks = table.slots, [Chunk(0, table.slots, self._cache.capacity)]
        else:
            rows, chunks = n, self._plan()
        ints = self._to_device(table.ints[[col.TOKEN, col.POSITION], :rows])
        output = self._backend.decode(ints[0], ints[1], self._cache, chunks)
        table.ints[col.POSITION, :n] += 1
        return Output(output.hidden_NH[:n], output.logits_NV[:n])

    def _plan(self) -> list[Chunk]:
        """Attention chunks; sorts the rows by length once padding has cost as much as moving them would."""
        lengths = self._table.lengths
        chunks = plan(lengths, self._column_size)
        self._waste += padded(chunks) - int(lengths.sum())
        if self._waste > SORT_COST * int(lengths.sum()):
            self._waste = 0
            order = self._to_device(self._table.sort())
            self._cache.move(torch.arange(len(order), device=order.device), order, int(lengths.max()))
            chunks = plan(self._table.lengths, self._column_size)
        return chunks

    def _admit(self) -> list[Output]:
        """Start waiting requests in free slots; what their first token is drawn from, one entry a prefill."""
        table = self._table
        free = min(self.options.slots - table.n, len(self._waiting))
        if not free:
            return []
        requests = list(itertools.islice(self._waiting.values(), free))
        kept = {r.id: past for r in requests if (past := self._kept.take(r.id, r.prompt_ids))}
        self._prefill(dict.fromkeys(r.prompt_ids for r in requests if r.id not in kept))
        batches: dict[int, tuple[Prefilled, list[int], list[Request]]] = {}
        for request in requests:
            del self._waiting[request.id]
            prompt = self._leave_queue(request)
            if request.id in kept:
                continue
            assert prompt.prefilled is not None
            _, index, members = batches.setdefault(id(prompt.prefilled), (prompt.prefilled, [], []))
            index.append(prompt.index)
            members.append(request)
        outputs = [self._insert(*batch) for batch in batches.values()]
        return outputs + self._go_on([r for r in requests if r.id in kept], kept)

    def _go_on(self, requests: list[Request], kept: dict[Hashable, Kept]) -> list[Output]:
        """Start further turns, of which only what is new goes through the model."""
        tails = {r.id: r.prompt_ids[len(kept[r.id].tokens) :] for r in requests}
        outputs = []
        for group in self._together(requests, lambda r: tails[r.id]):
            extended = self._backend.extend([tails[r.id] for r in group], [kept[r.id] for r in group])
            outputs.append(self._insert(extended, list(range(len(group))), group))
        return outputs

    def _prefill(self, prompts: Iterable[tuple[int, ...]]) -> None:
        """Run the prompts among these that have not been."""
        for group in self._together([p for p in prompts if self._prompts[p].prefilled is None], lambda p: p):
            prefilled = self._backend.prefill(group)
            for index, prompt in enumerate(group):
                self._prompts[prompt].prefilled, self._prompts[prompt].index = prefilled, index

    def _together(self, items: list[T], tokens: Callable[[T], tuple[int, ...]]) -> list[list[T]]:
        """Groups of what goes through the model in one pass, where `tokens` gives the new tokens of each."""
        groups: list[list[T]] = []
        for item in sorted(items, key=lambda i: len(tokens(i))):
            group, length = groups[-1] if groups else [], len(tokens(item))
            shortest = len(tokens(group[0])) if group else 0
            alike = length == shortest or (self._backend.mixed_lengths and length <= 2 * shortest + 16)
            if group and alike and not self.options.fixed_slots and length * (len(group) + 1) <= PREFILL_TOKENS:
                group.append(item)
            else:
                groups.append([item])
        return groups

    def _insert(self, prefilled: Prefilled, index: list[int], requests: list[Request]) -> Output:
        longest = max(len(r.prompt_ids) + r.params.max_tokens for r in requests)
        self._cache.reserve(max(longest, prefilled.keys[0].shape[2]))
        rows = self._table.append(requests, [self._stops.add(r.params.stop) for r in requests], self.clock)
        lengths = [prefilled.lengths[i] for i in index]
        index_M = self._to_device(np.array(index))
        keys = [k.index_select(0, index_M) for k in prefilled.keys]
        values = [v.index_select(0, index_M) for v in prefilled.values]
        self._cache.insert(self._to_device(np.arange(rows.start, rows.stop)), keys, values, lengths)
        return Output(prefilled.last.hidden_NH[index_M], prefilled.last.logits_NV[index_M])

    def _sample(self, logits_NV: torch.Tensor) -> list[Any]:
        """Tokens, log-probabilities, confidences and untransformed log-probabilities; the last two if some row asks."""
        table, n = self._table, self._table.n
        ints = self._to_device(table.ints[: col.DEVICE_ROWS, :n])
        floats = self._to_device(table.floats[:, :n])
        greedy = self._to_device(table.greedy[:n]) if table.greedy[:n].any() else None
        filtered = table.ints[col.TOP_K, :n].any() or (table.floats[1, :n] < 1).any()
        rows = Rows(floats[0], greedy, ints[col.TOP_K] if filtered else None, floats[1] if filtered else None)
        tokens_N, logp_N = sample(logits_NV, uniform(ints[col.KEY], ints[col.COUNT]), rows)
        confidence_N = confidence(logits_NV) if table.confident[:n].any() else None
        raw_logp_N = logp_N if table.raw[:n].any() else None
        if (changed_N := table.transformed)[table.raw[:n]].any():
            raw_logp_N = torch.where(self._to_device(changed_N), raw_logp(logits_NV, tokens_N), logp_N)
        return [x if x is None else x.cpu().numpy() for x in (tokens_N, logp_N, confidence_N, raw_logp_N)]

    def _settle(self, rows: list[int], hidden_NH: torch.Tensor) -> list[Event]:
        """Look at the rows whose token or count may mean something."""
        events: list[Event] = []
        reasons = {row: self._stop_reason(row) for row in rows}
        hidden = self._hidden_of([row for row in rows if self._shows_hidden(row, reasons[row])], hidden_NH)
        for row, reason in reasons.items():
            if reason:
                self._keep(row)
                events.append(self._finished(row, reason, hidden.get(row)))
                continue
            if row in hidden:
                events.append(self._table.reached(row, hidden[row]))
            self._table.rearm(row)
        self._remove([row for row, reason in reasons.items() if reason])
        return events

    def _shows_hidden(self, row: int, reason: str) -> bool:
        request = self._table.requests[row]
        return request.last_hidden if reason else int(self._table.ints[col.COUNT, row]) in request.report_at

    def _hidden_of(self, rows: list[int], hidden_NH: torch.Tensor) -> dict[int, np.ndarray]:
        """float32 [H] by row; one copy from the device for all."""
        if not rows:
            return {}
        picked = hidden_NH[self._to_device(np.array(rows))].float().cpu().numpy()
        return dict(zip(rows, picked, strict=True))

    def _keep(self, row: int) -> None:
        """Keys and values of all but the last token, which has not been through the model; none of older weights."""
        request, (sampled, _) = self._table.requests[row], self._table.sampled(row)
        if request.keep and self._versions.unchanged_since(int(self._table.ints[col.BORN, row])):
            tokens = (*request.prompt_ids, *sampled[:-1].tolist())
            self._kept.put(request.id, Kept(tokens, *self._cache.copy_of(row, len(tokens))))

    def _stop_reason(self, row: int) -> str:
        tokens, _ = self._table.sampled(row)
        stop_set = int(self._table.ints[col.STOP_SET, row])
        if int(tokens[-1]) in self._stops.eos_ids:
            return "eos"
        if self._stops.alert[stop_set, tokens[-1]] and self._stops.completed(stop_set, tokens):
            return "stop"
        return "length" if len(tokens) == self._table.requests[row].params.max_tokens else ""

    def _remove(self, rows: list[int]) -> None:
        if not rows:
            return
        targets, sources = self._table.remove(rows)
        if len(targets):
            columns = int(self._table.ints[col.POSITION, targets].max()) + 1
            with torch.inference_mode():
                self._cache.move(self._to_device(targets), self._to_device(sources), columns)
        if not self.pending:  # an idle engine remembers nothing that could change what comes next
            self._waste = 0
            self._versions.forget(self.clock)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._backend.device)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine failed earlier and cannot go on ({self._failure}); build a new one")


def _concatenate(outputs: list[Output]) -> Output:
    return Output(torch.cat([o.hidden_NH for o in outputs]), torch.cat([o.logits_NV for o in outputs]))
