"""A real vLLM server on this machine, started by the command of docs/server.md."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from winnow.engine.server.client import Client

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
START_S = 180.0
LONG = 8000
"""Tokens of a sequence: more than a server samples between a resume and a pause."""


def documented(command: str = "python -m") -> str:
    """The command of the page that has this in it, in one line."""
    blocks = re.findall(r"^ {4}(VLLM_SERVER_DEV_MODE=1 (?:.*\\\n)+.*)$", TEXT, re.MULTILINE)
    (found,) = (block for block in blocks if command in block)
    return re.sub(r"\\\n\s*", "", found)


class RealServer:
    """A server of a model, by the page's command; `without` leaves out a part of it."""

    def __init__(self, model: Path, log: Path, without: str = "") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        given = documented().replace("models/small", str(model)).replace("8000", str(self.port))
        assert without in given
        words = shlex.split(given.replace(without, "") if without else given)
        values = dict(word.split("=", 1) for word in words if re.match(r"^[A-Z_]+=", word))
        self._command = [sys.executable, *words[len(values) + 1 :]]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self._env = inherited | values | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        self._log = log
        self.start()

    def start(self) -> None:
        """Start it, on the port it had, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self._log.read_text()[-3000:])

    def num_sampled(self) -> float:
        """How many tokens it has sampled since it started."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    @contextmanager
    def held(self) -> Iterator[Client]:
        """Paused after the body, with sequences that have begun and not ended.

        It samples in turns and is asked between them: while it samples, its answers may come too late.
        """
        client = Client(self.url)
        client.post("/pause?mode=keep", None, 30)
        before, deadline = self.num_sampled(), time.monotonic() + START_S
        yield client
        while (sampled := self.num_sampled() - before) == 0:
            assert time.monotonic() < deadline, "nothing sampled"
            client.post("/resume", None, 30)
            client.post("/pause?mode=keep", None, 30)
        assert sampled < LONG, f"{sampled} tokens in one turn: a sequence may have ended"

    def kill(self) -> None:
        """End it with all it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
