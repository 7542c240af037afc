"""The embedded engine: continuous batching over a Hugging Face causal LM, in the caller's process.

A step decodes one token of every running row, starts waiting requests in the free slots (siblings share one prefill
of their prompt), and samples for all of them. Sequences live in the first n slots; whoever ends gives way to the last.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from ...base.weights import Weights
from .. import slots as col
from ..base import Event, Finished, Request
from ..facts import Facts
from ..loading import ModelReference, resolve_device
from ..sequences import SequenceEngine, Sequences
from ..slots import Drawn
from .backend import Output, Prefilled
from .cache import Chunk, KVCache, padded, plan
from .kept import Kept, KeptSequences
from .llama import LlamaBackend
from .models import DTYPES, fixed_columns, make_backend

T = TypeVar("T")

PREFILL_TOKENS = 16_384
"""Prompt tokens of one prefill, padding included."""
DRAFT_LOGITS = 1 << 24
"""Logits of drafts that are computed at a time."""
MOST_SLOTS = 65_536
"""What a slot keeps besides its sequence takes seconds to lay out when there are more."""
FIXED_ROWS = 32
"""With fixed slots, rows computed are a multiple of this."""
SORT_COST = 16
"""Rows are sorted once attention has read this many times the cache in padding; measured on CPU."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The embedded engine: continuous batching in this process over any Hugging Face causal LM with a KV cache."""

    provides: ClassVar[frozenset[str]] = SequenceEngine.provides

    slots: int = 256
    """Sequences that run at once."""
    dtype: str | None = None
    """`float32`, `bfloat16` or `float16`; None is the model's."""
    fixed_slots: bool = False
    """Compute every slot and column in every forward pass: slower, but results do not depend on what else runs."""
    max_length: int | None = None
    """Longest prompt plus completion; None is the model's limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"slots must be from 1 to {MOST_SLOTS}, not {self.slots}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)} or None, not {self.dtype!r}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, not {self.max_length}")

    def build(self, model: ModelReference, tokenizer: Any) -> LocalEngine:
        return LocalEngine(model.load(), tokenizer, device=model.device, **asdict(self))


@dataclass(slots=True)
class _Prompt:
    """A prompt, kept until the last request for it has started."""

    waiting: int = 0
    prefilled: Prefilled | None = None
    index: int = 0


class LocalEngine(SequenceEngine):
    """Generates with a Hugging Face causal LM in this process; an `Engine`. Not thread-safe."""

    def __init__(self, model: Any, tokenizer: Any, *, device: torch.device | str | None = None, **options: Any) -> None:
        """Copy the weights of `model`, a `transformers` causal LM.

        `device`: default: the model's. `options`: see `LocalOptions`. Raises ValueError for a model without an ordinary
        KV cache.
        """
        self.options = LocalOptions(**options)
        slots, fixed_slots = self.options.slots, self.options.fixed_slots
        facts = Facts.of(model, tokenizer, self.options.max_length)
        self._backend = make_backend(model, facts, self.options.dtype, device)
        # Element-wise kernels compute what is left over after whole vectors in another way: leave nothing over.
        rows = -(-slots // FIXED_ROWS) * FIXED_ROWS if fixed_slots else slots
        self.provides = SequenceEngine.provides | ({"drafts"} if isinstance(self._backend, LlamaBackend) else set())
        self._cache = KVCache(self._backend.kv_shapes, rows, self._backend.dtype, self._backend.device)
        self._column_size = sum(h * s for shapes in self._backend.kv_shapes[:1] for h, s in shapes) // 2
        if fixed_slots:
            self._cache.reserve(rows, fixed_columns(facts.max_length))
        self.sequences = Sequences(facts, tokenizer, rows, self._backend.device)
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        # With fixed slots nothing may depend on what else runs, so not on what had to make room either.
        self._kept = KeptSequences(0 if fixed_slots else slots)
        self._waste = 0
        self._released = False

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> LocalEngine:
        """Load an engine from a Hugging Face directory or hub name, without running code from it.

        Options as in `__init__`, but `device` defaults to a GPU if the machine has one.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return cls(model, tokenizer, **{"device": resolve_device("auto")} | options)

    @property
    def dtype(self) -> str:
        """Type of weights, keys and values."""
        return str(self._backend.dtype).removeprefix("torch.")

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position."""
        return sum(h * s for shapes in self._backend.kv_shapes for h, s in shapes) * self._backend.dtype.itemsize

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        for request in self.sequences.submit(requests):
            self._prompts.setdefault(request.prompt_ids, _Prompt()).waiting += 1

    def cancel(self, ids: Iterable[Hashable]) -> list[Finished]:
        ids = list(ids)
        events, left, rows = self.sequences.cancelled(ids)
        for id_ in ids:
            self._kept.forget(id_)
        for request in left:
            self._leave_queue(request)
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
        self.sequences.require_alive()
        state = self.sequences.facts.check_state(weights)
        if not self._released:  # or there would be two sets of weights for a moment
            self._backend.release()
        self._released = True
        self._backend.load(state)
        self._forget()
        self._released = False
        self.sequences.loaded(version)

    def release(self) -> None:
        """Give up the memory of the weights, and of the KV cache if nothing runs, until `load_weights` is called.

        The learner has it meanwhile, where both share a device. Raises nothing; `step` does, until then.
        """
        if not self._released:
            self._backend.release()
        self._released = True
        self._forget()
        if not self.sequences.table.n and not self.options.fixed_slots:
            self._cache.clear()

    def _forget(self) -> None:
        """What older weights computed and no running row needs."""
        for prompt in self._prompts.values():
            prompt.prefilled = None
        self._kept.clear()

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self) -> list[Event]:
        if self._released:
            raise RuntimeError("the engine's weights were released; call load_weights before the next step")
        started, sequences = time.perf_counter(), self.sequences
        table = sequences.table
        outputs = [self._decode()] if table.n else []
        outputs += self._admit()
        output = outputs[0] if len(outputs) == 1 else _concatenate(outputs)
        rows = slice(0, table.n)
        alarms = sequences.record(rows, sequences.draw(output.logits_NV, rows))
        drawn_at = time.perf_counter()
        table.clock += (drawn_at - started) / table.n
        events, ended = sequences.settle(
            np.flatnonzero(alarms).tolist(), lambda some: output.hidden_NH[self._to_device(np.array(some))]
        )
        for row in ended:
            self._keep(row)
        self._remove(ended)
        table.clock += (time.perf_counter() - drawn_at) / max(table.n, 1)
        return events

    def _decode(self) -> Output:
        """Feed the last token of every running row."""
        table = self.sequences.table
        n = table.n
        if self.options.fixed_slots:
            rows, chunks = table.slots, [Chunk(0, table.slots, self._cache.columns)]
        else:
            rows, chunks = n, self._plan()
        ints = self._to_device(table.ints[[col.TOKEN, col.POSITION], :rows])
        output = self._backend.decode(ints[0], ints[1], self._cache, chunks)
        table.ints[col.POSITION, :n] += 1
        return Output(output.hidden_NH[:n], output.logits_NV[:n])

    def _plan(self) -> list[Chunk]:
        """Attention chunks; sorts the rows by length once padding has cost as much as moving them would."""
        table = self.sequences.table
        lengths = table.lengths
        device = self._backend.device.type
        chunks = plan(lengths, self._column_size, device)
        self._waste += padded(chunks) - int(lengths.sum())
        if self._waste > SORT_COST * int(lengths.sum()):
            self._waste = 0
            order = self._to_device(table.sort())
            self._cache.move(torch.arange(len(order), device=order.device), order, int(lengths.max()))
            chunks = plan(table.lengths, self._column_size, device)
        return chunks

    def _admit(self) -> list[Output]:
        """Start waiting requests in free slots; what their first token is drawn from, one entry a prefill."""
        waiting = self.sequences.waiting
        free = min(self.options.slots - self.sequences.table.n, len(waiting))
        if not free:
            return []
        requests = list(itertools.islice(waiting.values(), free))
        kept = {r.id: past for r in requests if (past := self._kept.take(r.id, r.prompt_ids))}
        self._prefill(dict.fromkeys(r.prompt_ids for r in requests if r.id not in kept))
        outputs, drafted = self._go_on([r for r in requests if r.id in kept], kept)
        batches: dict[int, tuple[Prefilled, list[int], list[Request]]] = {}
        for request in requests:
            prompt = self._leave_queue(request)
            if request.id in kept:
                continue
            assert prompt.prefilled is not None
            if self._reads_draft(request):
                drafted.append((request, prompt))
                continue
            _, index, members = batches.setdefault(id(prompt.prefilled), (prompt.prefilled, [], []))
            index.append(prompt.index)
            members.append(request)
        return outputs + [self._insert(*batch) for batch in batches.values()] + self._read(drafted)

    def _go_on(
        self, requests: list[Request], kept: dict[Hashable, Kept]
    ) -> tuple[list[Output], list[tuple[Request, _Prompt]]]:
        """Start further turns, of which only what is new goes through the model; return also those with drafts."""
        tails = {r.id: r.prompt_ids[len(kept[r.id].tokens) :] for r in requests}
        outputs, drafted = [], []
        for group in self._together(requests, lambda r: tails[r.id]):
            extended = self._backend.extend([tails[r.id] for r in group], [kept[r.id] for r in group])
            plain = [i for i, request in enumerate(group) if not self._reads_draft(request)]
            if plain:
                outputs.append(self._insert(extended, plain, [group[i] for i in plain]))
            rest = [i for i in range(len(group)) if i not in plain]
            drafted += [(group[i], _Prompt(prefilled=extended, index=i)) for i in rest]
        return outputs, drafted

    def _reads_draft(self, request: Request) -> bool:
        """Whether to read a draft. One token is drawn anyway, and a penalty makes tokens depend on those before."""
        return len(request.draft) > 1 and "drafts" in self.provides and request.params.repetition_penalty == 1

    def _read(self, drafted: list[tuple[Request, _Prompt]]) -> list[Output]:
        """Start requests with a draft, which goes through the model in one pass, but for its last token."""
        outputs, backend = [], self._backend
        for group in self._together(drafted, lambda d: d[0].draft[:-1]):
            assert isinstance(backend, LlamaBackend)
            requests, lengths = [r for r, _ in group], [len(r.draft) for r, _ in group]
            read = backend.read([r.draft[:-1] for r in requests], [_past(r, prompt) for r, prompt in group])
            hidden: list[torch.Tensor] = []
            for (_, prompt), tail in zip(group, read.hidden_NH.split([n - 1 for n in lengths]), strict=True):
                assert prompt.prefilled is not None
                hidden += [prompt.prefilled.last.hidden_NH[prompt.index : prompt.index + 1], tail]
            hidden_NH = torch.cat(hidden)
            rows = self.sequences.start(requests)
            drawn = self._draw_drafts(backend, rows, lengths, hidden_NH)
            starts = np.cumsum([0, *lengths[:-1]])
            accepted = [
                self.sequences.accept(row, request.draft, drawn.part(start, start + len(request.draft)))
                for row, request, start in zip(range(rows.start, rows.stop), requests, starts.tolist(), strict=True)
            ]
            longest = max(len(r.prompt_ids) + r.params.max_tokens for r in requests)
            self._cache.reserve(rows.stop, max(longest, read.keys[0].shape[2]))
            filled = [len(r.prompt_ids) + n for r, n in zip(requests, accepted, strict=True)]
            self._cache.insert(rows, self._to_device(np.arange(len(group))), read.keys, read.values, filled)
            next_MH = hidden_NH[self._to_device(starts + accepted)]
            outputs.append(Output(next_MH, backend.logits(next_MH)))
        return outputs

    def _draw_drafts(self, backend: LlamaBackend, rows: slice, lengths: list[int], hidden_NH: torch.Tensor) -> Drawn:
        """Draw as many first tokens of each row, from the hidden states of all; some logits at a time."""
        index_N = np.repeat(np.arange(rows.start, rows.stop), lengths)
        counts_N = np.concatenate([np.arange(n) for n in lengths])
        size = max(1, DRAFT_LOGITS // self.sequences.facts.vocab_size)
        parts = []
        for start in range(0, len(index_N), size):
            some = slice(start, start + size)
            logits = backend.logits(hidden_NH[some])
            parts.append(self.sequences.draw(logits, index_N[some], counts_N[some]))
        return Drawn.joined(parts)

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
        rows = self.sequences.start(requests)
        self._cache.reserve(rows.stop, max(longest, prefilled.keys[0].shape[2]))
        lengths = [prefilled.lengths[i] for i in index]
        index_M = self._to_device(np.array(index))
        self._cache.insert(rows, index_M, prefilled.keys, prefilled.values, lengths)
        return Output(prefilled.last.hidden_NH[index_M], prefilled.last.logits_NV[index_M])

    def _keep(self, row: int) -> None:
        """Keys and values of all but the last token, which has not been through the model; none of older weights."""
        table = self.sequences.table
        request, (sampled, _) = table.requests[row], table.sampled(row)
        if request.keep and self.sequences.unchanged(row):
            tokens = (*request.prompt_ids, *sampled[:-1].tolist())
            self._kept.put(request.id, Kept(tokens, *self._cache.copy_of(row, len(tokens))))

    def _remove(self, rows: list[int]) -> None:
        if not rows:
            return
        targets, sources = self.sequences.remove(rows)
        if len(targets):
            columns = int(self.sequences.table.ints[col.POSITION, targets].max()) + 1
            with torch.inference_mode():
                self._cache.move(self._to_device(targets), self._to_device(sources), columns)
        if not self.pending:  # an idle engine remembers nothing that could change what comes next
            self._waste = 0

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return self.sequences.to_device(array)


def _past(request: Request, prompt: _Prompt) -> Kept:
    """Return keys and values of a request's prompt."""
    assert prompt.prefilled is not None
    n, index = len(request.prompt_ids), prompt.index
    keys, values = ([t[index, :, :n] for t in tensors] for tensors in (prompt.prefilled.keys, prompt.prefilled.values))
    return Kept(request.prompt_ids, keys, values)


def _concatenate(outputs: list[Output]) -> Output:
    return Output(torch.cat([o.hidden_NH for o in outputs]), torch.cat([o.logits_NV for o in outputs]))
