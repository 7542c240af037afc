"""The policy as an OpenAI-compatible server on this machine: `POST /<secret>/v1/chat/completions`.

Each conversation has its own address with a secret in its path. Any client with a `base_url` can use it, and other
parties cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...env.workers.calls import warn_from_thread
from ...types import Message
from .messages import messages_of, wire
from .settings import settings_of, without_effect

MODEL = "policy"
MAX_BODY_BYTES = 64 << 20
"""Largest request in bytes."""
MAX_NAME = 64
"""Most characters of an agent's name."""
MOST_FILES = 65_536
"""Open files that are enough for all agents at once."""
STALLED_S = 30
"""Seconds without a byte after which a connection is closed."""
SHARED = "rollouts run at the same time and share os.environ and global clients"
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
NO_ADDRESS = (
    "no such address: only /v1/chat/completions is served. If that is the route, its rollout has ended: "
    f"{SHARED}, so give each client its own base_url"
)


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
        prompt, answered = getattr(self.text, "prompt_tokens", 0), getattr(self.text, "tokens", 0)
        return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}


class Client:
    """The connection of a request. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        """Else a client that is answered and leaves, while another thread looks, would seem to have left before."""
        self._answering = False
        self._closed = False

    @property
    def gone(self) -> bool:
        """Whether the client closed the connection before it had an answer, e.g. at its timeout."""
        with self._lock:
            if not self._answering and not self._closed:
                self._closed = _closed(self._connection)
            return self._closed

    def begin_answer(self) -> bool:
        """Return whether the client still waits. A connection closed later has had its answer, unless it is `lost`."""
        with self._lock:
            self._answering = not self.gone
            return self._answering

    def lost(self) -> None:
        """Note that the client closed the connection without reading its answer."""
        self._closed = True


def _closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection from which nothing is being read."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


def allow_connections() -> None:
    """Raise this process's limit of open files, usually 1,024: an agent that waits takes two, both ends of its
    connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


Ask = Callable[..., Answer]
"""Passes a request to the policy, see `AgentEnv.ask`."""


class Endpoint(ThreadingHTTPServer):
    """Serves on a free port of 127.0.0.1 from its creation until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self) -> None:
        allow_connections()
        super().__init__(("127.0.0.1", 0), _Request)
        self.asks: dict[str, Ask] = {}
        self._reached: set[str] = set()
        """Addresses that have had a request."""
        self._warned: set[str] = set()
        threading.Thread(target=self.serve_forever, name="winnow-endpoint", daemon=True).start()

    def open(self, ask: Ask) -> str:
        """Return a `base_url` for requests of one rollout, valid until `forget`."""
        secret = secrets.token_urlsafe(16)
        self.asks[secret] = ask
        return f"http://127.0.0.1:{self.server_address[1]}/{secret}/v1"

    def forget(self, base_url: str) -> None:
        secret = _secret(base_url)
        self.asks.pop(secret, None)
        self._reached.discard(secret)

    def ask_at(self, secret: str) -> Ask | None:
        """Return what answers a request to an address."""
        ask = self.asks.get(secret)
        if ask is not None:
            self._reached.add(secret)
        return ask

    def warn(self, *causes: str, text: str) -> None:
        """Warn once about each cause; `{}` in the text is where the new ones go."""
        if new := sorted(set(causes) - self._warned):
            self._warned.update(new)
            warn_from_thread(f"agent: {text.format(', '.join(new))}")

    def shared_address(self) -> str:
        """Return the environment variable with an address of this server, which all rollouts see; else empty text."""
        own = f"http://127.0.0.1:{self.server_address[1]}/"
        # `get`: agents in other threads may remove a variable meanwhile
        return next((name for name in sorted(os.environ) if os.environ.get(name, "").startswith(own)), "")

    def unasked(self, base_url: str) -> str:
        """Return what to do where an agent has sent no request to its address; else empty text."""
        if _secret(base_url) in self._reached:
            return ""
        if name := self.shared_address():
            return f"; {name} in os.environ is the address of one rollout, but {SHARED}: give base_url to its client"
        proxy = _proxy()
        by_proxy = f"{proxy} is set, so add 127.0.0.1 to {_exceptions()}; else " if proxy else ""
        return (
            f"; no request came to its base_url: {by_proxy}give that to its client ({SHARED}; the address is of this "
            "machine, not of a container or another host)"
        )

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

    client: Client | None = None
    """Client whose answer is being sent, until its next request."""

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            if self.client is not None:
                self.client.lost()
            raise

    def do_GET(self) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "winnow"}
        if self._ask("/v1/models") is not None:
            self._json(200, {"object": "list", "data": [model]})
        elif self._ask(f"/v1/models/{MODEL}") is not None:
            self._json(200, model)
        else:
            self._refuse(404, NO_ADDRESS)

    def do_POST(self) -> None:
        self.client = None
        ask = self._ask("/v1/chat/completions")
        if ask is None:  # before reading a stranger's data
            self.close_connection = True
            return self._refuse(404, NO_ADDRESS)
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or len(size) > len(str(MAX_BODY_BYTES)) or int(size) > MAX_BODY_BYTES:
            self.close_connection = True
            return self._refuse(413, f"Content-Length must be at most {MAX_BODY_BYTES}, not {size[:20]!r}")
        body = self.rfile.read(int(size))
        client = Client(self.connection)
        try:
            given = json.loads(body)
            if not isinstance(given, dict):
                raise ValueError("a request is an object")
            settings = settings_of(given)
            messages = messages_of(given.get("messages"))
            self._warn_of(given)
            retried = _retried(self.headers.get("X-Stainless-Retry-Count"))
            answer = ask(messages, agent=_agent(given.get("model")), retried=retried, client=client, **settings)
        except OverError:
            client.begin_answer()
            return self._refuse(410, "the rollout has ended")
        except (ValueError, RecursionError) as error:
            return self._refuse(400, str(error))
        if not client.begin_answer():
            self.close_connection = True
            return None
        self.client = client
        if not given.get("stream"):
            return self._json(200, *_completions(answer, streamed=False))
        events = [*map(json.dumps, _completions(answer, streamed=True)), "[DONE]"]
        self._send(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())
        self.client = None  # it may stop reading

    def _warn_of(self, given: dict[str, Any]) -> None:
        """Warn of settings without effect, and of an address that the agent cannot have meant."""
        server = self.server
        of_the_run, unknown = without_effect(given)
        server.warn(*of_the_run, text="its requests set {}; the run's settings hold instead")
        server.warn(*unknown, text="its requests set {}, which has no effect here")
        if name := server.shared_address():
            text = "{} in os.environ is the address of one rollout, but " + SHARED
            server.warn(name, text=f"{text}: give base_url to each client")

    def _ask(self, route: str) -> Ask | None:
        secret, slash, rest = self.path.partition("?")[0].lstrip("/").partition("/")
        ask = self.server.ask_at(secret)
        return ask if slash + rest == route else None

    def _refuse(self, status: int, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the console is the user's."""


def _exceptions() -> str:
    """Return the variable that clients read for what needs no proxy: the lower-case one first."""
    return "no_proxy" if os.environ.get("no_proxy") else "NO_PROXY"


def _proxy() -> str:
    """Return the environment variable that sends requests for this machine to a proxy; else empty text."""
    excepted = os.environ.get(_exceptions(), "")
    if {"127.0.0.1", "*"} & set(excepted.replace(",", " ").split()):
        return ""
    return next((name for name in PROXIES if os.environ.get(name)), "")


def _secret(base_url: str) -> str:
    return base_url.split("/")[-2]


def _agent(model: Any) -> str:
    """Return the agent that a request names, as in `policy/solver`."""
    return str(model or "").partition("/")[2][:MAX_NAME]


def _retried(count: str | None) -> bool | None:
    """Return whether the client repeats a request (OpenAI's says so in a header); None if it does not say."""
    return None if count is None else count != "0"


def _completions(answer: Answer, *, streamed: bool) -> list[dict[str, Any]]:
    """Return an answer in the form of OpenAI's API, or the two events of its stream: clients end tool calls with the
    second."""
    message = wire(answer.message)
    shared = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": MODEL}
    if not streamed:
        choice = {"index": 0, "message": message, "finish_reason": answer.reason}
        return [shared | {"object": "chat.completion", "choices": [choice], "usage": answer.usage}]
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
    shared["object"] = "chat.completion.chunk"
    said: dict[str, Any] = {"index": 0, "delta": message, "finish_reason": None}
    end: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": answer.reason}
    return [shared | {"choices": [said]}, shared | {"choices": [end], "usage": answer.usage}]
