"""The engine over vLLM's synchronous core.

vLLM schedules, caches and computes; a step of its core is one token of every running sequence that is not in prefill.
Tokens are drawn where the model would hand its logits on: by the rule and the noise of every other engine, so that a
request's tokens do not depend on who runs it. vLLM's sampler then finds one possible token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from ...base.errors import ConfigError
from ...base.weights import Weights
from ..base import Event, Request, SamplingParams
from ..facts import Facts
from ..loading import ModelReference, build_meta_model
from ..sequences import SequenceEngine, Sequences
from ..slots import COUNT, Drawn
from .adapters import Adapters
from .core import Core, LeadingCore, RankExecutor

DISCARD: Final = 2
OFFLOAD: Final = 1
"""Levels of vLLM's sleep: weights are gone, or wait on the host."""


class VllmEngine(SequenceEngine):
    """Implements `winnow.engine.base.Engine`. Not thread-safe."""

    def __init__(self, source: str, model: ModelReference, tokenizer: Any, arguments: dict[str, Any]) -> None:
        """`source` is a directory or hub name with the weights of `model`, `arguments` are for vLLM's `EngineArgs`.

        Raises ConfigError when vLLM refuses it.
        """
        policy = model.described()
        limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        longest = arguments["max_model_len"]
        facts = Facts.from_model(policy, tokenizer, None if longest is None else min(longest, limit))
        self._slots: int = arguments["max_num_seqs"]
        self._added = 0
        self._loads = 0
        self._sleeps, self._asleep = bool(arguments.get("enable_sleep_mode")), False
        try:
            adapters = None
            if model.adapters is not None:
                adapters = Adapters.from_model(build_meta_model(source), model.adapters)
            several = arguments["tensor_parallel_size"] > 1
            arguments = arguments | (adapters.arguments() if adapters else {})
            fits = longest is None and not several  # each of several ranks would fit a length of its own
            arguments["max_model_len"] = -1 if fits else facts.max_length
            arguments["distributed_executor_backend"] = RankExecutor if several else None
            core = LeadingCore if several else Core
            self._core = core(arguments, adapters)
            if fits:
                facts = replace(facts, max_length=int(self._core.config.model_config.max_model_len))
            self._weight_facts = facts if adapters is None else adapters.facts(facts)
            self.sequences = Sequences(facts, tokenizer, self._slots, self._core.runner.device)
            self.sequences.table.counts_computed = False  # what vLLM's prefix cache spares is not known here
            self._head = _Head(self._core, self.sequences)
            self._try_out()
        except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"engine: vLLM cannot run '{source}': {first}; or set engine: local") from error
        self.sequences.clock = 0

    @property
    def dtype(self) -> str:
        """Type of weights, keys and values."""
        return str(self._core.config.model_config.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        return torch.device(self._core.runner.device)

    def load_weights(self, weights: Weights, version: int) -> None:
        self.sequences.require_alive()
        state = self._weight_facts.check_state(weights)
        with self.sequences.step():
            table = self.sequences.table
            fresh = [r for row, r in enumerate(table.requests[: table.n]) if table.ints[COUNT, row] == 0]
            self._abort(fresh)  # what has no token yet starts again, so that its prompt is computed by the new weights
            if self._asleep:
                self._core.wake("weights")
            self._core.load(state)
            if self._asleep:
                self._core.wake("kv_cache")
                self._asleep = False
            self._loads += 1
            self.sequences.loaded(version)
            for request in fresh:
                self._add(request)

    def release(self) -> None:
        """Give up the memory of weights, keys and values until `load_weights`, where `sleep` is on and nothing runs.

        Weights under adapters are not published again: they wait on the host.
        """
        if self._sleeps and not self._asleep and not self.pending:
            self._core.sleep(DISCARD if self._weight_facts is self.sequences.facts else OFFLOAD)
            self._asleep = True

    def close(self) -> None:
        """Free the memory of vLLM, end the other processes that its layers are cut among, and remove what vLLM left
        outside of this one. All happens in any case when this process ends. Later calls raise RuntimeError."""
        self.sequences.close()
        if self._asleep:  # else vLLM frees memory that is not there, and its allocator refuses the next engine
            with suppress(RuntimeError):
                for tag in ("weights", "kv_cache"):
                    self._core.wake(tag)
            self._asleep = False
        vars(self).pop("_head", None)  # it holds the model
        self._core.close()

    # ---- one step ----------------------------------------------------------------------------------------------

    def _step(self) -> list[Event]:
        if self._asleep:
            raise RuntimeError("the engine's weights were released; call load_weights before the next step")
        started, sequences = time.perf_counter(), self.sequences
        table = sequences.table
        self._admit()
        sampled = self._core.step()
        names = [name for name, token_ids in sampled.items() if token_ids]
        if not names:  # prompts longer than a step takes
            return []
        rows = np.array([table.row_of[self._head.ids[name]] for name in names])
        drawn, hidden_of = self._head.take(names)
        if [int(sampled[name][0]) for name in names] != drawn.tokens_N.tolist():
            raise RuntimeError("vLLM sampled another token than the only possible one")
        alarms = sequences.record(rows, drawn)
        drawn_at = time.perf_counter()
        table.clock += (drawn_at - started) / table.n
        place = {int(row): i for i, row in enumerate(rows)}
        events, ended = sequences.check(rows[alarms].tolist(), lambda some: hidden_of([place[row] for row in some]))
        self._remove(ended)
        table.clock += (time.perf_counter() - drawn_at) / max(table.n, 1)
        return events

    def _try_out(self) -> None:
        """Two tokens: some kernels say only now that they do not know a model's shapes."""
        self.submit([Request("trial", (0,), SamplingParams(2, temperature=0), key=0)])
        while self.pending:
            self.step()

    def _admit(self) -> None:
        """Start waiting requests in free slots."""
        waiting = self.sequences.waiting
        free = self._slots - self.sequences.table.n
        requests = list(waiting.values())[:free]
        self.sequences.start(requests)
        for request in requests:
            self._add(request)

    def _add(self, request: Request) -> None:
        """Keys and values are shared with whoever began alike under the same weights: siblings, and a turn before."""
        name, self._added = str(self._added), self._added + 1
        inner = self._core.add(name, request.prompt_ids, str(self._loads), request.params.max_tokens)
        self._head.know(request.id, name, inner)

    def _abort(self, requests: list[Request]) -> None:
        names = [self._head.forget(request.id) for request in requests]
        self._core.abort(names)

    def _remove(self, rows: list[int]) -> None:
        if rows:
            table = self.sequences.table
            self._abort([table.requests[row] for row in rows])
            self.sequences.remove(rows)


class _Head:
    """Draws a token for each row where the model hands its logits on, and knows vLLM's names for the requests."""

    def __init__(self, core: Core, sequences: Sequences) -> None:
        self.ids: dict[str, Hashable] = {}
        """Request by vLLM's name for it, of which it has an outer and an inner one."""
        self._names: dict[Hashable, tuple[str, str]] = {}
        self._runner = core.runner
        self._sequences = sequences
        self._drawn: tuple[dict[Hashable, int], Drawn, torch.Tensor] | None = None
        core.draw_by(self._draw)

    def know(self, id_: Hashable, outer: str, inner: str) -> None:
        self._names[id_] = (outer, inner)
        self.ids[outer] = self.ids[inner] = id_

    def forget(self, id_: Hashable) -> str:
        """Its outer name."""
        outer, inner = self._names.pop(id_)
        del self.ids[outer], self.ids[inner]
        return outer

    def _draw(self, hidden_NH: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor | None:
        names = self._runner.input_batch.req_ids
        if len(names) != len(hidden_NH):
            return None  # vLLM tries itself out
        ids = [self.ids[name] for name in names]
        rows = np.array([self._sequences.table.row_of[id_] for id_ in ids])
        drawn = self._sequences.draw(logits_NV[:, : self._sequences.facts.vocab_size], rows)
        self._drawn = {id_: i for i, id_ in enumerate(ids)}, drawn, hidden_NH
        return self._sequences.to_device(drawn.tokens_N)

    def take(self, names: list[str]) -> tuple[Drawn, Any]:
        """What was drawn for these, in order, and their hidden states by place in that order."""
        assert self._drawn is not None
        place, drawn, hidden_NH = self._drawn
        at = np.array([place[self.ids[name]] for name in names])
        self._drawn = None
        return drawn.at(at), lambda some: hidden_NH[self._sequences.to_device(at[some])]
