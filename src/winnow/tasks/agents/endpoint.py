"""The policy as an OpenAI-compatible server on this machine: `POST /<secret>/v1/chat/completions`.

Each conversation has its own address with a secret in its path. Any client with a `base_url` can use it, and other
parties cannot.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...types import Message
from .messages import messages_of, tools_of, wire

MODEL = "policy"
MAX_BODY_BYTES = 64 << 20
"""Largest request in bytes."""
MAX_NAME = 64
"""Most characters of an agent's name."""
STALLED_S = 30
"""Seconds without a byte after which a connection is closed."""
WITH_STOP = "include_stop_str_in_output"
"""vLLM's name for an answer with the stop string that ended it."""
HEEDED = {"model", "messages", "tools", "stream", "stream_options", "n", WITH_STOP}


class OverError(RuntimeError):
    """The rollout has ended; further requests get no answer."""


@dataclass(frozen=True)
class Answer:
    """The policy's answer."""

    message: Message
    text: str
    """A `ModelTurn`."""

    @property
    def reason(self) -> str:
        if getattr(self.text, "stop_reason", None) == "length":
            return "length"
        return "tool_calls" if "tool_calls" in self.message else "stop"

    @property
    def usage(self) -> dict[str, int]:
        asked, answered = getattr(self.text, "prompt_tokens", 0), getattr(self.text, "tokens", 0)
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


Ask = Callable[..., Answer]
"""Passes a request to the policy, see `AgentEnv.ask`."""


class Endpoint(ThreadingHTTPServer):
    """Serves on a free port of 127.0.0.1 from its creation until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.asks: dict[str, Ask] = {}
        self._unheeded: set[str] = set()
        threading.Thread(target=self.serve_forever, name="winnow-endpoint", daemon=True).start()

    def open(self, ask: Ask) -> str:
        """Return a `base_url` for requests of one rollout, valid until `forget`."""
        secret = secrets.token_urlsafe(16)
        self.asks[secret] = ask
        return f"http://127.0.0.1:{self.server_address[1]}/{secret}/v1"

    def forget(self, base_url: str) -> None:
        self.asks.pop(base_url.split("/")[-2], None)

    def unheeded(self, keys: set[str]) -> None:
        """Warn once about each setting without effect here."""
        if new := sorted(keys - self._unheeded):
            self._unheeded |= keys
            warnings.warn(f"agent: its requests set {', '.join(new)}; the run's settings hold instead", stacklevel=2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of broken connections."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    server: Endpoint
    timeout = STALLED_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "winnow", ""

    def do_GET(self) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "winnow"}
        if self._ask("/v1/models") is None:
            return self._refuse(404, "no such address")
        self._json(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        ask = self._ask("/v1/chat/completions")
        if ask is None:  # before reading a stranger's data
            self.close_connection = True
            return self._refuse(404, "no such address, or its rollout has ended; there is /v1/chat/completions")
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or len(size) > len(str(MAX_BODY_BYTES)) or int(size) > MAX_BODY_BYTES:
            self.close_connection = True
            return self._refuse(413, f"Content-Length must be at most {MAX_BODY_BYTES}, not {size[:20]!r}")
        body = self.rfile.read(int(size))
        try:
            given = json.loads(body)
            if not isinstance(given, dict) or given.get("n") not in (None, 1):
                raise ValueError("a request is an object, for one answer (n=1)")
            self.server.unheeded({key for key, value in given.items() if value is not None} - HEEDED)
            answer = ask(
                messages_of(given.get("messages")),
                tools_of(given.get("tools")),
                with_stop=bool(given.get(WITH_STOP)),
                agent=_agent(given.get("model")),
                retried=_retried(self.headers.get("X-Stainless-Retry-Count")),
            )
        except OverError:
            return self._refuse(410, "the rollout has ended")
        except (ValueError, RecursionError) as error:
            return self._refuse(400, str(error))
        if given.get("stream"):
            return self._events(_chunks(answer))
        self._json(200, _completion(answer))

    def _ask(self, route: str) -> Ask | None:
        secret, slash, rest = self.path.partition("?")[0].lstrip("/").partition("/")
        return self.server.asks.get(secret) if slash + rest == route else None

    def _refuse(self, status: int, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _events(self, chunks: Iterator[dict[str, Any]]) -> None:
        """Send all events at once: the answer is already complete."""
        body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
        self._send(200, "text/event-stream", body)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the console is the user's."""


def _envelope(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    name = f"chatcmpl-{secrets.token_hex(8)}"
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, **choice}],
    }


def _agent(model: Any) -> str:
    """Return the agent that a request names, as in `policy/solver`."""
    return str(model or "").partition("/")[2][:MAX_NAME]


def _retried(count: str | None) -> bool | None:
    """Return whether the client repeats a request (OpenAI's says so in a header); None if it does not say."""
    return None if count is None else count != "0"


def _completion(answer: Answer) -> dict[str, Any]:
    completion = _envelope("chat.completion", {"message": wire(answer.message), "finish_reason": answer.reason})
    return completion | {"usage": answer.usage}


def _chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    delta = wire(answer.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    yield _envelope("chat.completion.chunk", {"delta": delta, "finish_reason": None})
    end = _envelope("chat.completion.chunk", {"delta": {}, "finish_reason": answer.reason})
    yield end | {"usage": answer.usage}
