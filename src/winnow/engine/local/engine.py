"""The embedded engine: continuous batching over a Hugging Face causal LM, in the caller's process.

A step decodes one token of every running sequence, starts waiting requests in the free slots, and samples for all of
them. Siblings share one prefill of their prompt, and one row of the cache as long as their tokens are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from ...base.seconds import DECODE_MORE, DECODE_ROWS, ENGINE_SECONDS, Seconds
from ...base.weights import Weights
from ...config.options import CHECKED
from .. import slots as col
from ..base import Event, Finished, Request
from ..facts import Facts
from ..loading import ModelReference, resolve_device
from ..sequences import SequenceEngine, Sequences
from ..slots import Drawn
from .backend import Kept, KeptSequences, Output, Prefilled, Tokens, WaitingPrompt, passes
from .beginnings import Beginnings
from .cache import CacheRows, Chunk, KVCache, padded, plan
from .hf import make_backend
from .llama import LlamaBackend

READ_ROWS = 16
"""Rows in flight up to which drafts are read. With more, a step's time is that of its rows, and reading a token takes
about as long as decoding it. A number, not a clock: the same run reads the same drafts. Chosen, not tuned."""
DRAFT_LOGITS = 1 << 24
"""Logits of drafts that are computed at a time."""
MOST_SLOTS = 65_536
"""What a slot keeps besides its sequence takes seconds to lay out when there are more."""
FIXED_ROWS = 32
"""With fixed slots, rows computed are a multiple of this."""
FIXED_COLUMNS = 4096
"""With fixed slots, most columns that a step may compute."""
SORT_COST = 16
"""Rows are sorted once attention has read this many times the cache in padding; measured on CPU."""


@dataclass(frozen=True, config=CHECKED)
class LocalOptions:
    """The embedded engine: continuous batching in this process over any Hugging Face causal LM with a KV cache."""

    provides: ClassVar[frozenset[str]] = SequenceEngine.provides

    slots: Annotated[int, Field(ge=1, le=MOST_SLOTS)] = 256
    """Sequences that run at once."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """None is the model's."""
    fixed_slots: bool = False
    """Compute every slot and column in every forward pass: slower, but results do not depend on what else runs."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus completion; None is the model's limit."""
    fused_kernels: bool = False
    """Run decode steps by Triton kernels: Llama family, half precision, CUDA. Not yet measured on a GPU."""

    def build(self, model: ModelReference, tokenizer: Any) -> LocalEngine:
        return LocalEngine(model.load(), tokenizer, device=model.device, **asdict(self))


class _Key(NamedTuple):
    """What goes through the model before a request's first token is drawn: its prompt, and the draft that it reads."""

    ids: tuple[int, ...]
    draft: tuple[int, ...]


class LocalEngine(SequenceEngine):
    """Generates with a Hugging Face causal LM in this process; an `Engine`. Not thread-safe."""

    def __init__(self, model: Any, tokenizer: Any, *, device: torch.device | str | None = None, **options: Any) -> None:
        """Copy the weights of `model`, a `transformers` causal LM.

        `device`: default: the model's. `options`: see `LocalOptions`. Raises ValueError for a model without an ordinary
        KV cache.
        """
        self.options = LocalOptions(**options)
        slots, fixed_slots = self.options.slots, self.options.fixed_slots
        facts = Facts.from_model(model, tokenizer, self.options.max_length)
        self._backend = make_backend(model, facts, self.options.dtype, device, self.options.fused_kernels)
        # Element-wise kernels compute what is left over after whole vectors in another way: leave nothing over.
        rows = -(-slots // FIXED_ROWS) * FIXED_ROWS if fixed_slots else slots
        self.provides = SequenceEngine.provides | ({"drafts"} if isinstance(self._backend, LlamaBackend) else set())
        self.no_drafts: str = getattr(self._backend, "unlike_llama", "")
        self._cache = KVCache(self._backend.kv_shapes, rows, self._backend.dtype, self._backend.device)
        self._column_size = sum(h * s for shapes in self._backend.kv_shapes[:1] for h, s in shapes) // 2
        if fixed_slots:
            if (columns := facts.max_length) is None or columns > FIXED_COLUMNS:
                raise ValueError(f"fixed_slots computes max_length={columns} columns a step; set it to what you need")
            self._cache.reserve(rows, columns)
        self._rows = CacheRows()
        self.sequences = Sequences(facts, tokenizer, rows, self._backend.device)
        self.sequences.sample = self._backend.sample
        self._to_device = self.sequences.to_device
        self._prompts: dict[_Key, WaitingPrompt] = {}
        # With fixed slots nothing may depend on what else runs, so not on what had to make room either.
        self._kept = KeptSequences(0 if fixed_slots else slots)
        self._beginnings = Beginnings(self._backend)
        self._waste = 0
        self._released = False
        self.seconds = Seconds(*ENGINE_SECONDS)

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

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        for request in self.sequences.submit(requests):
            self._prompts.setdefault(self._key(request), WaitingPrompt()).waiting += 1

    def cancel(self, ids: Iterable[Hashable]) -> list[Finished]:
        ids = list(ids)
        events, left, rows = self.sequences.cancelled(ids)
        for id_ in ids:
            self._kept.forget(id_)
        for request in left:
            self._leave_queue(request)
        self._remove(rows)
        return events

    def _leave_queue(self, request: Request) -> WaitingPrompt:
        key = self._key(request)
        prompt = self._prompts[key]
        prompt.waiting -= 1
        if not prompt.waiting:
            del self._prompts[key]
        return prompt

    def _key(self, request: Request) -> _Key:
        """Return what is read before the request's first token is drawn, its draft without the last token.

        No draft is read where a penalty makes tokens depend on those before, or by a backend that cannot.
        """
        reads = "drafts" in self.provides and request.params.repetition_penalty == 1
        return _Key(request.prompt_ids, request.draft[:-1] if reads else ())

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
        self._beginnings.clear()

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self) -> list[Event]:
        if self._released:
            raise RuntimeError("the engine's weights were released; call load_weights before the next step")
        spent, sequences = self.seconds, self.sequences
        table, started = sequences.table, spent.begin()
        self._arrange()
        outputs = []
        if table.n:
            outputs.append(self._decode())
            spent.lap(next((name for most, name in DECODE_ROWS.items() if self._rows.n <= most), DECODE_MORE))
        if sequences.waiting:
            outputs += self._admit()
        output = Output.joined(outputs)
        rows = slice(0, table.n)
        alarms = sequences.record(rows, sequences.draw(output.logits_NV, rows))
        drawn_at = spent.lap("sampling")
        table.clock += (drawn_at - started) / table.n
        events, ended = sequences.check(
            np.flatnonzero(alarms).tolist(), lambda some: output.hidden_NH[self._to_device(np.array(some))]
        )
        spent.lap("sampling")
        self._keep(ended)
        self._remove(ended)
        table.clock += (spent.lap("copying") - drawn_at) / max(table.n, 1)
        return events

    def _arrange(self) -> None:
        """Give sequences that have just parted rows of their own, and close the holes that others have left."""
        table = self.sequences.table
        targets, sources = self._rows.arrange(table.ints[col.TOKEN, : table.n])
        if len(targets):
            columns = int(table.ints[col.POSITION, self._rows.first_M[targets]].max())
            self._cache.reserve(self._rows.n, columns)
            self._cache.move(self._to_device(targets), self._to_device(sources), columns)

    def _decode(self) -> Output:
        """Feed the last token of every running sequence, once for those that have one row together."""
        table = self.sequences.table
        n = table.n
        first_M = self._rows.first_M
        last_2M = table.ints[: col.COUNT].take(first_M, 1)
        if self.options.fixed_slots:
            last_2M = np.pad(last_2M, ((0, 0), (0, table.slots - len(first_M))))
            chunks, order_M = [Chunk(0, table.slots, self._cache.columns)], None
        else:
            chunks, order_M = self._plan(last_2M[1] + 1)
            last_2M = last_2M if order_M is None else last_2M[:, order_M]
        if self.options.fused_kernels:
            first_M = first_M if order_M is None else first_M[order_M]
            self._cache.prompts[:, : len(first_M)] = self._to_device(self._rows.prompts(first_M))
        ints = self._to_device(last_2M)
        output = self._backend.decode(ints[0], ints[1], self._cache, chunks)
        table.ints[col.POSITION, :n] += 1
        table.num_reused_tokens[:n] += 1
        table.num_reused_tokens[first_M] -= 1
        table.num_computed_tokens[first_M] += 1
        if self._rows.n == n and (np.diff(self._rows.of_N) == 1).all():
            return Output(output.hidden_NH[:n], output.logits_NV[:n])
        of_N = self._to_device(self._rows.of_N)
        return Output(output.hidden_NH[of_N], output.logits_NV[of_N])

    def _plan(self, lengths_M: np.ndarray) -> tuple[list[Chunk], np.ndarray | None]:
        """Return attention chunks, and the order of rows, by length, once padding has cost as much as moving would."""
        device = self._backend.device.type
        chunks, filled = plan(lengths_M, self._column_size, device), int(lengths_M.sum())
        if device == "cuda" or not isinstance(self._backend, LlamaBackend):  # reads all rows as wide as the longest
            return chunks, None
        self._waste += padded(chunks) - filled
        if self._waste <= SORT_COST * filled:
            return chunks, None
        self._waste = 0
        order_M = np.argsort(-lengths_M, kind="stable")
        self._rows.sort(order_M)
        self._cache.move(self._to_device(np.arange(len(order_M))), self._to_device(order_M), int(lengths_M.max()))
        return plan(lengths_M[order_M], self._column_size, device), order_M

    def _admit(self) -> list[Output]:
        """Start waiting requests in free slots; what their first token is drawn from, one entry a prefill."""
        free = self.options.slots - self.sequences.table.n
        waiting: Iterable[Request] = self.sequences.waiting.values()
        if free and len(self._kept):  # first what would have to make room by its turn
            waiting = sorted(waiting, key=lambda request: request.id not in self._kept)
        requests = list(itertools.islice(waiting, free))
        kept = {r.prompt_ids: past for r in requests if (past := self._kept.take(r.id, r.prompt_ids))}
        keys = [self._key(request) for request in requests]
        self._prefill({key: self._prompts[key] for key in keys}, kept)
        batches: dict[Hashable, tuple[Prefilled, list[int], list[Request]]] = {}
        computed: dict[Hashable, int] = {}
        for key, request in zip(keys, requests, strict=True):
            prompt = self._leave_queue(request)
            computed[request.id], prompt.computed = prompt.computed, 0
            assert prompt.prefilled is not None
            # With fixed slots nothing may depend on what else runs.
            alone = self.options.fixed_slots and key.draft
            batch = request.id if alone else id(prompt.prefilled)
            _, index, members = batches.setdefault(batch, (prompt.prefilled, [], []))
            index.append(prompt.index)
            members.append(request)
        outputs = [self._insert(*batch) for batch in batches.values()]
        self.seconds.lap("copying")
        self.sequences.table.computed(computed)
        return outputs

    def _prefill(self, prompts: dict[_Key, WaitingPrompt], kept: dict[Tokens, Kept]) -> None:
        """Run the prompts among these that have not been; of those with a kept beginning only what is new."""
        missing = [key for key, prompt in prompts.items() if prompt.prefilled is None]
        # With fixed slots every step computes all rows, and nothing may depend on what else runs.
        reads = self.options.fixed_slots or self._rows.n + len(missing) <= READ_ROWS
        new = {key: key.ids + key.draft if reads else key.ids for key in missing}
        apart = [key.ids for key in missing if key.ids not in kept and not self.options.fixed_slots]
        begun, computed = self._beginnings.read(apart)
        if computed:
            self.seconds.lap("prefill")
        kept = kept | begun
        tails = {key: new[key][len(kept[key.ids].tokens) :] for key in missing if key.ids in kept}
        runs = []
        for group in self._together([key for key in missing if key not in tails], lambda key: (len(new[key]), 0)):
            drafts = [len(new[key]) - len(key.ids) for key in group]
            runs.append((group, self._backend.prefill([new[key] for key in group], drafts)))
            self.seconds.lap("drafts" if any(drafts) else "prefill")
        for group in self._together(list(tails), lambda key: (len(tails[key]), len(kept[key.ids].tokens))):
            drafts = [len(new[key]) - len(key.ids) for key in group]
            past = [kept[key.ids] for key in group]
            runs.append((group, self._backend.extend([tails[key] for key in group], past, drafts)))
            self.seconds.lap("drafts" if any(drafts) else "prefill")
        for group, prefilled in runs:
            for index, key in enumerate(group):
                prompts[key].prefilled, prompts[key].index = prefilled, index
                prompts[key].computed = len(tails.get(key, new[key])) + computed.pop(key.ids, 0)

    def _draw_drafts(self, rows: np.ndarray, lengths: np.ndarray, starts: np.ndarray, hidden_NH: torch.Tensor) -> Drawn:
        """Draw as many first tokens of each row as its draft has, row by row, from states that begin at `starts`.

        Some logits at a time, and those of a draft that several rows have once.
        """
        row_N, count_N = np.repeat(rows, lengths), np.concatenate([np.arange(n) for n in lengths])
        from_N = np.repeat(starts, lengths) + count_N
        order_N = np.argsort(from_N, kind="stable")
        size = max(1, DRAFT_LOGITS // self.sequences.facts.vocab_size)
        parts = []
        for some in np.split(order_N, range(size, len(order_N), size)):
            distinct, of_some = np.unique(from_N[some], return_inverse=True)
            logits = self._logits(hidden_NH[self._to_device(distinct)])[self._to_device(of_some)]
            parts.append(self.sequences.draw(logits, row_N[some], count_N[some]))
        return Drawn.joined(parts).at(np.argsort(order_N))

    def _together(self, keys: list[_Key], lengths: Callable[[_Key], tuple[int, int]]) -> list[list[_Key]]:
        """Return what goes through the model in one pass each; with fixed slots every prompt does by itself."""
        return (
            [[key] for key in keys] if self.options.fixed_slots else passes(keys, lengths, self._backend.mixed_lengths)
        )

    def _insert(self, prefilled: Prefilled, index: list[int], requests: list[Request]) -> Output:
        """Start requests behind the prompts `index`, with what they draw of their drafts."""
        started = self.sequences.start(requests)
        prompt_lengths, drafted = [prefilled.lengths[i] for i in index], prefilled.drafted
        if drafted is None or not (lengths := drafted.lengths_B[index]).any():
            self._fill(requests, prefilled, list(zip(index, prompt_lengths, strict=True)))
            index_N = self._to_device(np.array(index))
            return Output(prefilled.last.hidden_NH[index_N], prefilled.last.logits_NV[index_N])
        starts, hidden_NH = drafted.starts_B[index], drafted.hidden_NH
        some, accepted = np.flatnonzero(lengths), np.zeros(len(requests), dtype=np.int64)
        rows = started.start + some
        draft_N = np.concatenate([np.array(self._key(requests[i]).draft, np.int64) for i in some])
        drawn = self._draw_drafts(rows, lengths[some], starts[some], hidden_NH)
        accepted[some] = self.sequences.accept(rows, lengths[some], draft_N, drawn)
        self._fill(requests, prefilled, list(zip(index, (prompt_lengths + accepted).tolist(), strict=True)))
        next_MH = hidden_NH[self._to_device(starts + accepted)]
        return Output(next_MH, self._logits(next_MH))

    def _logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._backend, LlamaBackend)  # the only one that reads drafts
        return self._backend.logits(hidden_NH)

    def _fill(self, requests: list[Request], read: Prefilled, of: list[tuple[int, int]]) -> None:
        """Give new sequences rows of the cache; `of`: number of each in `read`, and how much of that is its own."""
        rows, beginnings = self._rows.append(of)
        longest = max(len(r.prompt_ids) + r.params.max_tokens for r in requests)
        self._cache.reserve(rows.stop, max(longest, read.keys[0].shape[2]))
        index, lengths = zip(*beginnings, strict=True)
        self._cache.insert(rows, self._to_device(np.array(index)), read.keys, read.values, list(lengths))

    def _keep(self, ended: list[int]) -> None:
        """Keep keys and values of all but the last token, which has not been through the model.

        None of older weights, and those of one cache row once.
        """
        table, copies = self.sequences.table, dict[int, Kept]()
        for row in ended:
            request, (sampled, _), cached = table.requests[row], table.sampled(row), int(self._rows.of_N[row])
            if request.keep and self.sequences.unchanged(row):
                tokens = (*request.prompt_ids, *sampled[:-1].tolist())
                if cached not in copies:
                    copies[cached] = Kept(tokens, *self._cache.copy_of(cached, len(tokens)))
                self._kept.put(request.id, copies[cached])

    def _remove(self, rows: list[int]) -> None:
        if rows:
            self._rows.remove(*self.sequences.remove(rows), self.sequences.table.n)
        if not self.pending:  # an idle engine remembers nothing that could change what comes next
            self._waste = 0
            self._beginnings.clear()
