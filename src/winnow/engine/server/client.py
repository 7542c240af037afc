"""JSON over HTTP to one vLLM server. Every call has a time limit, and every error names the URL."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ...base.errors import ExpectedError

PIECE = 1 << 16
SHOWN = 500
"""Characters of an answer that an error quotes."""


class ServerError(ExpectedError):
    """A vLLM server failed, or answered wrongly; the message names its URL and what to do."""


class StatusError(ServerError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Calls to one server, from any thread; each has a connection of its own, which the server sees close.

    `key`: of the configuration, where the URL comes from; `timeout_s` is next to it.
    """

    def __init__(self, url: str, key: str = "sync: server") -> None:
        parts = urlsplit(url)
        self._key = key
        self.url = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._address = parts.hostname or "", parts.port
        self._secure = parts.scheme == "https"

    def get(self, path: str, timeout_s: float) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """Return the JSON of the answer, None for an empty one.

        Raises StatusError for an error status, and ServerError when nothing answers in time or the answer is not JSON.
        """
        return self._call("POST", path, body, timeout_s)

    def error(self, what: str) -> ServerError:
        return ServerError(self.named(what))

    def named(self, what: str) -> str:
        return f"{self._key}: url {self.url}: {what}"

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        named = path.partition("?")[0]
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self._address, timeout=timeout_s)
        headers = {"Connection": "close"} | ({} if body is None else {"Content-Type": "application/json"})
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, text, headers)
            response = connection.getresponse()
            raw = _read(response, time.monotonic() + timeout_s)
        except TimeoutError:
            raise self.error(
                f"no answer to {named} within {timeout_s:.3g} s; see what the server does, or raise "
                f"{self._key.partition(':')[0]}.timeout_s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            what = f"no answer to {named} ({type(error).__name__}: {error})"
            raise self.error(f"{what}; correct the URL, or start the server") from None
        finally:
            connection.close()
        if response.status != 200:
            raise StatusError(self.named(f"{named}: status {response.status}: {_reason(raw)}"), response.status)
        return self._parsed(named, raw)

    def _parsed(self, path: str, raw: bytes) -> Any:
        try:
            return json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError):
            shown = raw[:80].decode(errors="replace")
            raise self.error(f"the answer to {path} is not JSON ({shown!r}); is this a vLLM server?") from None


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body. Raises TimeoutError at the deadline: a socket's own limit starts again with every byte."""
    pieces = []
    while piece := response.read1(PIECE):
        pieces.append(piece)
        if time.monotonic() > deadline:
            raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(b"".join(pieces), response.length)
    return b"".join(pieces)


def _reason(raw: bytes) -> str:
    """Return what an error answer says, as vLLM and FastAPI word it."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = raw.decode(errors="replace")
    while isinstance(content, Mapping):
        content = next((content[key] for key in ("error", "message", "detail") if key in content), str(content))
    text = str(content).strip()
    in_worker = re.search(r"Worker failed with error '(.*)', please check", text, re.DOTALL)
    return (in_worker.group(1) if in_worker else text)[:SHOWN] or "no reason given"
