"""The engine over a vLLM server: a request is one HTTP call, which returns when its sequence has ended.

Sequences run on the server between two calls of `step`, which collects those that have ended. What is sampled is vLLM's
choice: its noise is seeded by a request's key, and repeats only as far as vLLM does.
"""

from __future__ import annotations

import os
import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base.errors import ConfigError
from ...base.weights import Weights, save_tensors, transfer_s
from ..base import Event, Finished, Request, check_request
from ..facts import Facts
from ..loading import ModelReference
from .answers import AnswerReader
from .client import Client, ServerError, StatusError

LOOK_S = 0.05
"""Longest wait of a step."""
CALL_S = 86_400.0
"""Limit of one call; `step` gives up earlier."""
ABORT_S = 5.0
"""Longest wait for what a server has sampled of cancelled requests."""
LOAD_SHARE = 0.8
"""Share of the time limit that an update of weights may take: that of the sampler, which names no URL, comes later."""
SHAPES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Settings of a model's config that server and run must share."""
REPORTS = ("report_at", "raw_logp", "last_hidden")
VLLM_COLDEST, VLLM_HOTTEST = 0.01, 2.0
"""Lowest temperature but 0, as vLLM raises lower ones to it, and the highest that it takes."""
LOWEST_BIAS, MOST_BIASES = -100.0, 1024
"""What vLLM takes: the lowest bias of a token, and the biases of a request."""
SERVER_PREFIX = "generate-tokens-"
"""What vLLM puts before the id of a request."""
UNREADABLE = (
    "the server must see the run's directory under the same path, and be started by the same user; set output_dir to a "
    "directory that both share"
)


class Arrived(NamedTuple):
    """The end of a call."""

    call: str
    version: int
    """Policy version of the server when it was sent."""
    seconds: float
    outcome: Any
    """The server's answer, or the error that came in its place."""


class ServerEngine:
    """Implements `winnow.engine.base.Engine`. Not thread-safe; its own threads make the calls."""

    provides = frozenset({"logp"})

    def __init__(
        self,
        client: Client,
        config: Mapping[str, Any],
        model: ModelReference,
        tokenizer: Any,
        *,
        timeout_s: float,
        slots: int,
        max_length: int | None,
    ) -> None:
        """`config`: the server's. Raises ConfigError when it has another model, ServerError when it does not answer."""
        policy = model.described()
        self.version = 0
        self.dtype = str(config["model_config"].get("dtype", "unknown")).removeprefix("torch.")
        # On a CPU vLLM 0.32 dies of a seeded request whose tokens it reads in two steps.
        self._seeded = (config.get("device_config") or {}).get("device") != "cpu"
        self._client, self._timeout_s, self._slots = client, timeout_s, slots
        limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        longest, length = min(max_length or limit, limit), int(config["model_config"]["max_model_len"])
        if length < longest:
            raise ConfigError(
                client.named(
                    f"its max_model_len is {length}, and a prompt with its completion may have {longest} tokens; start "
                    "it with a larger --max-model-len, or lower max_prompt_length or max_completion_length"
                )
            )
        self.facts = Facts.from_model(policy, tokenizer, longest)
        self.max_length = self.facts.max_length
        self._name = secrets.token_hex(4)
        """Part of the labels of its weights: those of other runs, and of its predecessor, have another."""
        self._label = ""
        self._versions: dict[str, int] = {}
        """Policy version by label."""
        self._reader = AnswerReader(client, self.facts, tokenizer, self._versions)
        padding = range(self.facts.vocab_size, policy.get_input_embeddings().num_embeddings)
        if len(padding) > MOST_BIASES:
            raise ConfigError(
                f"model: {len(padding)} ids of its vocabulary are no token, and vLLM can keep {MOST_BIASES} from being "
                "sampled; call model.resize_token_embeddings(len(tokenizer))"
            )
        self._biases = {str(token): LOWEST_BIAS for token in padding}
        self._calls: dict[str, Request] = {}
        self._call_of: dict[Hashable, str] = {}
        self._sent: set[str] = set()
        self._dropped: set[str] = set()
        """Cancelled calls that have not ended."""
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._failure = ""
        self._heard_at = self._clock_at = time.monotonic()
        self._clock = self._tokens = self._seconds = 0.0
        shapes = {name: getattr(policy.config.get_text_config(), name, None) for name in SHAPES}
        known = {name: value for name, value in shapes.items() if value is not None}
        try:
            client.post("/init_weight_transfer_engine", {"init_info": {"model": known}}, timeout_s)
        except StatusError as error:  # no answer is a failure, and replaced as such
            raise ConfigError(f"{error}; start it with the run's model") from None

    @property
    def pending(self) -> int:
        return len(self._calls)

    @property
    def clock(self) -> int:
        """Tokens of a sequence that runs since the start, at the mean speed of those that have ended."""
        now = time.monotonic()
        if self._seconds:
            self._clock += (now - self._clock_at) * self._tokens / self._seconds
        self._clock_at = now
        return int(self._clock)

    def close(self) -> None:
        """Refuse all later calls. The server goes on; it drops what still runs when this process ends."""
        self._failure = self._failure or "the engine is closed; build a new one"
        for _ in self._threads:
            self._orders.put(None)

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        self._require_alive()
        new: dict[Hashable, Request] = {}
        for request in requests:
            if request.id in new or request.id in self._call_of:
                raise ValueError(f"request id {request.id!r} is already in use")
            self._check(request)
            new[request.id] = request
        if not self.pending:
            self._heard_at = time.monotonic()
        for request in new.values():
            call = self._call_of[request.id] = secrets.token_hex(8)
            self._calls[call] = request
            self._orders.put(call)
        while len(self._threads) < min(self._slots, self.pending):
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()

    def cancel(self, ids: Iterable[Hashable]) -> list[Finished]:
        """Stop these sequences; return what the server says that it has sampled of them."""
        self._require_alive()
        calls = [self._call_of[id_] for id_ in dict.fromkeys(ids) if id_ in self._call_of]
        ended: dict[str, Arrived] = {}
        self._dropped.update(calls)  # first: those that wait for a slot are not sent any more
        running, deadline = {call for call in calls if call in self._sent}, time.monotonic() + ABORT_S
        while running and time.monotonic() < deadline:  # one that it has not yet read is aborted next time
            named = [SERVER_PREFIX + call for call in running]
            with suppress(ServerError):
                self._client.post("/inference/v1/abort_requests", {"request_ids": named}, ABORT_S)
            for arrived in self._collect(ABORT_S / 10):
                ended[arrived.call] = arrived
            running -= ended.keys()
        for arrived in ended.values():
            if arrived.call not in calls:
                self._arrived.put(arrived)
        return [self._cancelled(call, ended.get(call)) for call in calls]

    def step(self) -> list[Event]:
        """Return the sequences that have ended since the last call, after waiting a moment for the first.

        Raises ServerError when the server fails, answers what it cannot have sampled, or nothing for `timeout_s`.
        """
        self._require_alive()
        if not self.pending:
            return []
        try:
            events: list[Event] = [self._ended(a) for a in self._collect(LOOK_S) if a.call in self._calls]
            now = time.monotonic()
            self._heard_at = now if events else self._heard_at
            if now - self._heard_at > self._timeout_s:
                raise self._client.error(
                    f"none of {self.pending} requests was answered for {self._timeout_s:g} s; see what the "
                    "server does, or raise sync.timeout_s above what a rollout may take"
                )
        except ServerError as error:
            self._failure = str(error)
            raise
        return events

    def _check(self, request: Request) -> None:
        check_request(request, self.facts.vocab_size, self.facts.max_length)
        who = f"request {request.id!r}"
        if asked := [name for name in REPORTS if getattr(request, name)]:
            raise ValueError(f"{who}: {asked[0]}: a vLLM server does not report it; use engine: vllm, without servers")
        params = request.params
        if 0 < params.temperature < VLLM_COLDEST:
            raise ValueError(f"{who}: temperature {params.temperature}: vLLM samples at {VLLM_COLDEST}; raise it")
        if params.temperature > VLLM_HOTTEST:
            raise ValueError(f"{who}: temperature {params.temperature}: vLLM takes at most {VLLM_HOTTEST:g}; lower it")
        if params.min_p and params.top_p < 1:
            raise ValueError(
                f"{who}: min_p with top_p: vLLM applies min_p first, and the learner last; use one of them"
            )

    def _work(self) -> None:
        while (call := self._orders.get()) is not None:
            request = self._calls.get(call)
            if request is not None and call not in self._dropped:
                self._arrived.put(self._ask(call, request))

    def _ask(self, call: str, request: Request) -> Arrived:
        version, started = self.version, time.monotonic()
        body = {"request_id": call, "token_ids": list(request.prompt_ids), "sampling_params": self._params(request)}
        if self._label:
            body["cache_salt"] = self._label  # else its prompt would take keys and values of earlier weights
        self._sent.add(call)
        if call in self._dropped or call not in self._calls:
            self._sent.discard(call)
            return Arrived(call, version, 0.0, None)
        try:
            outcome = self._client.post("/inference/v1/generate", body, CALL_S)
        except Exception as error:  # raised by the next step
            outcome = error
        return Arrived(call, version, time.monotonic() - started, outcome)

    def _params(self, request: Request) -> dict[str, Any]:
        """Return vLLM's `SamplingParams`: nothing is left to the defaults of the model's generation config."""
        params = request.params
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(params, name) for name in names}
        values |= {"logprobs": 0} | ({"seed": request.key % 2**63} if self._seeded else {})
        values |= {"ignore_eos": True, "stop_token_ids": sorted(self.facts.eos_ids)}  # the run's ends, and no others
        values |= {"detokenize": bool(params.stop), "skip_special_tokens": False, "stop": list(params.stop)}
        return values | ({"logit_bias": self._biases} if self._biases else {})

    def _collect(self, wait_s: float) -> list[Arrived]:
        """Return the calls that have ended, waiting for the first."""
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._arrived.get(timeout=wait_s))
            while True:
                arrived.append(self._arrived.get_nowait())
        return arrived

    def _ended(self, arrived: Arrived) -> Finished:
        finished = self._finished(arrived)
        if finished.stop_reason == "cancelled":
            raise self._client.error("it aborted a request of the run; let nobody else pause it or abort requests")
        self._tokens += len(finished.token_ids)
        self._seconds += arrived.seconds
        return finished

    def _finished(self, arrived: Arrived) -> Finished:
        if isinstance(arrived.outcome, Exception):
            raise arrived.outcome
        share = arrived.seconds / max(self.pending, 1)
        return self._reader.finished(self._forget(arrived.call), arrived.version, arrived.outcome, share)

    def _cancelled(self, call: str, arrived: Arrived | None) -> Finished:
        if arrived is not None and isinstance(arrived.outcome, Mapping):
            return replace(self._finished(arrived), stop_reason="cancelled")
        none = np.zeros(0)
        arrays = none.astype(np.int64), none.astype(np.float32), none.astype(np.int32)
        return Finished(self._forget(call).id, *arrays, "cancelled", 0.0)

    def _forget(self, call: str) -> Request:
        request = self._calls.pop(call)
        self._sent.discard(call)
        self._dropped.discard(call)
        del self._call_of[request.id]
        return request

    def _require_alive(self) -> None:
        if self._failure:
            raise RuntimeError(self._failure)

    # ---- weights -----------------------------------------------------------------------------------------------

    def load_weights(self, weights: Weights, version: int) -> None:
        self.facts.check_state(weights)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.safetensors"
            save_tensors(weights, file)
            self.load_file(str(file), version)

    def load_file(self, path: str, version: int) -> None:
        """Have the server load a safetensors file, which it must see under the same path. Running sequences go on.

        Raises ServerError when it does not; it then stays paused until weights are loaded.
        """
        self._require_alive()
        label = f"{self._name}-{version}"
        limit_s = LOAD_SHARE * self._timeout_s + transfer_s(os.path.getsize(path))
        deadline = time.monotonic() + limit_s

        def call(phase: str, body: Mapping[str, Any] | None = None) -> None:
            self._client.post(phase, body, max(1.0, deadline - time.monotonic()))

        if not self.pending:
            self._versions.clear()
        self._versions[label] = version
        try:
            call("/pause?mode=keep")
            try:
                call("/start_weight_update")
            except StatusError:
                with suppress(StatusError):
                    call("/finish_weight_update")  # of an update that a killed run began
                call("/start_weight_update")
            try:
                call("/update_weights", {"update_info": {"path": os.path.abspath(path)}})
            except StatusError as error:
                raise StatusError(f"{error}; {UNREADABLE}", error.status) from None
            call("/finish_weight_update", {"weight_version": label})
            call("/resume")
        except ServerError as error:
            self._failure = str(error)
            raise
        self._label, self.version = label, version
        self._heard_at = time.monotonic()
