"""A stand-in for a vLLM server: its HTTP interface over the embedded engine, and the faults that a server may have."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.engine import Finished, LocalEngine, ModelReference, Request, SamplingParams
from winnow.engine.server.engine import ServerEngine
from winnow.engine.server.options import ServerOptions

Answer = dict[str, Any]


class QuietServer(ThreadingHTTPServer):
    request_queue_size = 2_048  # connections that wait, as in vLLM

    def handle_error(self, *args: Any) -> None:
        """Print nothing of clients that are gone."""


class StandIn:
    """Serves a model on a free port of this machine; usable from the test while it serves.

    `spoil` changes answers to requests, `statuses` has the status of a path that fails, `hangs` holds requests back.
    """

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._lock = threading.Lock()
        """Held while a request runs, and by a pause."""
        length = self._model.config.max_position_embeddings
        self.config: dict[str, Any] = {
            "model_config": {"dtype": "float32", "logprobs_mode": "processed_logprobs", "max_model_len": length},
            "weight_transfer_config": {"backend": "winnow"},
        }
        self.spoil: Callable[[Answer], Answer] = lambda answer: answer
        self.statuses: dict[str, int] = {}
        self.hangs = threading.Event()
        self.aborted = threading.Event()
        self.calls: list[str] = []
        self.bodies: list[Answer] = []
        """Of requests for tokens."""
        self.paused = self.updating = False
        self.restart()
        self._http = QuietServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._http.block_on_close = False
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def restart(self) -> None:
        """Begin with the first weights, as a server does that was started again."""
        with self._lock:
            self.label = "default"
            self.paused = self.updating = False
            self._engine = LocalEngine(copy.deepcopy(self._model), self._tokenizer, slots=8)

    def close(self) -> None:
        """Stop answering: connections are refused."""
        self.hangs.clear()
        self.aborted.set()
        self._http.shutdown()
        self._http.server_close()

    def post(self, path: str, body: Answer) -> tuple[int, Any]:
        """Return status and content."""
        self.calls.append(path)
        if path in self.statuses:
            return self.statuses[path], {"error": {"message": "set to fail", "type": "InternalServerError"}}
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path == "/inference/v1/abort_requests":
            self.aborted.set()
        elif path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/start_weight_update":
            if self.updating:
                return 500, {"error": {"message": "a weight update is already active"}}
            self.updating = True
        elif path == "/update_weights":
            return self._load(body["update_info"]["path"])
        elif path == "/finish_weight_update":
            if not self.updating:
                return 500, {"error": {"message": "called without a matching start"}}
            self.updating, self.label = False, body.get("weight_version", self.label)
        elif path == "/init_weight_transfer_engine":
            return self._compare(body["init_info"]["model"])
        else:
            return 404, {"error": {"message": "Not Found"}}
        return 200, {"message": "done"}

    def _compare(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        for name, value in wanted.items():
            if (own := getattr(self._model.config, name)) != value:
                return 500, {"error": {"message": f"another model: its {name} is {own}, the run's is {value}"}}
        return 200, {}

    def _load(self, path: str) -> tuple[int, Any]:
        if not self.updating:
            return 500, {"error": {"message": "start_weight_update must be called before update_weights"}}
        try:
            state = load_file(path)
        except OSError as error:
            return 500, {"error": {"message": f"cannot read {path}: {error}"}}
        with self._lock:
            self._engine.load_weights(state, self._engine.version + 1)
        return 200, {}

    def _generate(self, body: Answer) -> tuple[int, Any]:
        if "token_ids" not in body:
            return 400, {"error": {"message": "token_ids: field required"}}
        self.bodies.append(body)
        given = body["sampling_params"]
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        params = SamplingParams(**{name: given[name] for name in names}, stop=tuple(given["stop"]))
        while self.hangs.is_set():
            if self.aborted.wait(0.02):
                return 200, self.spoil(_answer([], [], "abort", None, self.label))
        with self._lock:
            self._engine.submit([Request("it", tuple(body["token_ids"]), params, given["seed"])])
            events: list[Any] = []
            while self._engine.pending:
                events += self._engine.step()
            label = self.label
        (ended,) = (event for event in events if isinstance(event, Finished))
        return 200, self.spoil(_as_vllm(ended, params, label))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path in owner.statuses:
                    self._reply(owner.statuses[path], {"detail": "set to fail"})
                elif path == "/health":
                    self._reply(200, None)
                elif path == "/server_info":
                    self._reply(200, {"vllm_config": owner.config})
                else:
                    self._reply(404, {"detail": "Not Found"})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._reply(*owner.post(self.path.partition("?")[0], json.loads(raw) if raw else {}))

            def _reply(self, status: int, content: Any) -> None:
                raw = b"" if content is None else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


def _as_vllm(ended: Finished, params: SamplingParams, label: str) -> Answer:
    reason, cause = {"eos": ("stop", int(ended.token_ids[-1])), "length": ("length", None)}.get(
        ended.stop_reason, ("stop", params.stop[0] if params.stop else None)
    )
    return _answer(ended.token_ids.tolist(), ended.logp.tolist(), reason, cause, label)


def _answer(tokens: list[int], logp: list[float], reason: str, cause: Any, label: str) -> Answer:
    content = [{"token_id": token, "logprob": value, "rank": 1} for token, value in zip(tokens, logp, strict=True)]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}}
    choice |= {"finish_reason": reason, "stop_reason": cause}
    spans = [{"version": label, "start": 0, "end": len(tokens)}] if tokens else []
    return {"request_id": "r", "choices": [choice | {"weight_versions": spans}]}


@pytest.fixture
def server(tiny_model: Path) -> Iterator[StandIn]:
    stand_in = StandIn(tiny_model)
    yield stand_in
    stand_in.close()


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def connect(server: StandIn, model: Path, tokenizer: Any, timeout_s: float = 20.0, **options: Any) -> ServerEngine:
    """An engine with weights of version 0."""
    given = ServerOptions(server.url, timeout_s, **options)
    engine: ServerEngine = given.build(ModelReference(str(model), torch.device("cpu")), tokenizer)
    return engine
