"""The report page of unfinished runs over HTTP: the same page and data as `winnow report`. Read only.

Requests must carry the token, since pages show run contents. Other users of this machine can reach its ports, and so
can a web page that lures a browser (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from ..base.errors import ConfigError
from ..record.records import CONFIG, LEDGER, METRICS, SAMPLES, WARNINGS
from .report import page_of, report_data

CHANGING = (CONFIG, METRICS, SAMPLES, WARNINGS, LEDGER, f"{LEDGER}-wal")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def mark_of(runs: Sequence[Path]) -> str:
    """Return a digest that changes when any of the runs' files grows, without reading them."""
    sha = hashlib.sha256()
    for file in (run / name for run in runs for name in CHANGING):
        found = None
        with suppress(OSError):  # SQLite removes the write-ahead log when a run ends
            found = file.stat()
        sha.update(f"{file}{found and (found.st_size, found.st_mtime_ns)}".encode())
    return sha.hexdigest()[:16]


AT_ONCE_S = 0.2
"""A page that is read in less is read whenever something has changed."""


class Watch(ThreadingHTTPServer):
    """Serves `/`, the page, and `/data.json`, the data a page reloads; use `serve_forever` and `server_close`.

    `token`: the secret in the address; generated if not given. `port`: 0 for any free one. Raises ConfigError when it
    cannot listen there, ValueError when one of `runs` is no run directory.
    """

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the console is the user's, and strangers may send anything."""

    def __init__(self, runs: Sequence[Path], host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.runs, self.token = runs, token or secrets.token_urlsafe(16)
        self._held, self._mark, self._data = threading.Lock(), "", {}  # type: ignore[var-annotated]
        self._rest_until = 0.0
        self.document()
        try:
            super().__init__((host, port), _Asked)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error}); --port 0 takes a free one") from None
        self.url = f"http://{host}:{self.server_address[1]}/?token={self.token}"

    def document(self) -> tuple[str, dict[str, Any]]:
        """Return the page's data and its mark, read again only when a file of the runs has changed.

        Reading takes at most a tenth of the time: a long run changes in every second, and takes seconds to read.
        """
        with self._held:
            mark, began = mark_of(self.runs), time.monotonic()
            if mark != self._mark and began >= self._rest_until:
                self._data = report_data(self.runs)
                self._mark = mark
                if (took := time.monotonic() - began) > AT_ONCE_S:
                    self._rest_until = began + 10 * took
            return self._mark, self._data


class _Asked(BaseHTTPRequestHandler):
    """One request."""

    server: Watch
    timeout = 30
    server_version, sys_version = "winnow", ""
    kinds: ClassVar[dict[str, str]] = {"/": "text/html; charset=utf-8", "/data.json": "application/json"}

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        given = parse_qs(asked.query).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            return self._answer(403, b"the address lacks ?token=, or has another one\n")
        if asked.path not in self.kinds:
            return self._answer(404, b"there is only /\n")
        try:
            mark, data = self.server.document()
        except (OSError, ValueError) as error:
            return self._answer(503, f"{error}\n".encode())
        if self.headers.get("If-None-Match") == mark:
            return self._answer(304, b"")
        body = page_of(data | {"live": mark}) if asked.path == "/" else json.dumps(data, allow_nan=False)
        return self._answer(200, body.encode(), self.kinds[asked.path], mark)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8", mark: str = "") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if mark:
            self.send_header("ETag", mark)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the console is the user's."""
