"""One child process: exchange lines under a deadline, report its exit, kill it with everything it started."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from .forkserver import Forked

LAST_WORDS = 2_000
"""Bytes of stderr kept while lines are read."""
ENDING_S = 1.0
"""Seconds a process may take to exit, and its stderr to close, once its output is closed."""


class GroupProcess(subprocess.Popen[bytes]):
    """Process that leads its own session; `kill` ends the whole session, even after the leader has exited."""

    stdin: Any
    stdout: Any
    stderr: Any

    def __init__(self, command: Sequence[str], *, stdin: Any = subprocess.PIPE, **options: Any) -> None:
        """`options`: of `subprocess.Popen`."""
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        super().__init__(command, bufsize=0, start_new_session=True, **pipes, **options)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Child:
    """A process with pipes. One thread reads and ends it; any thread may `kill`, and one other thread may send."""

    def __init__(self, process: GroupProcess | Forked) -> None:
        self.process = process
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._searched = 0
        """Bytes of `stdout` already searched for the end of a line."""
        self._lock = threading.Lock()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(process.stdout, selectors.EVENT_READ, self.stdout)
        self._selector.register(process.stderr, selectors.EVENT_READ, self.stderr)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)

    @property
    def exited(self) -> bool:
        return self.process.poll() is not None

    def send(self, data: bytes, deadline: float = math.inf) -> None:
        """Write to stdin. Raises TimeoutError if it is not read by the deadline, EOFError if it is closed."""
        stdin, rest = self.process.stdin, memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            while rest:
                if not selector.select(_seconds_to(deadline)):
                    raise TimeoutError
                try:
                    rest = rest[os.write(stdin.fileno(), rest[:65_536]) :]
                except OSError:
                    raise EOFError from None

    def line(self, deadline: float = math.inf, longest: int | None = None) -> bytes:
        """Return the next line without its end.

        Raises TimeoutError at the deadline, EOFError once the output has closed, ValueError beyond `longest` bytes.
        """
        while (end := self.stdout.find(b"\n", self._searched)) < 0:
            self._searched = len(self.stdout)
            if longest is not None and self._searched > longest:
                raise ValueError(f"a reply of over {longest} bytes")
            if self.process.stdout not in self._selector.get_map():
                raise EOFError
            self._read(deadline)
            del self.stderr[:-LAST_WORDS]
        line = bytes(self.stdout[:end])
        del self.stdout[: end + 1]
        self._searched = 0
        return line

    def finish(self, deadline: float, most: float = math.inf) -> int:
        """Collect `stdout` and `stderr` until both are closed and the process has exited; return its status.

        Raises TimeoutError at the deadline, ValueError if either exceeds `most` bytes.
        """
        while self._selector.get_map():
            self._read(deadline)
            if max(len(self.stdout), len(self.stderr)) > most:
                raise ValueError(f"output of over {most} bytes")
        try:
            return self.process.wait(_seconds_to(deadline))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def ending(self) -> str:
        """Return exit status and last words, once its output has closed or it was killed; kill any leftovers."""
        try:
            status = self.process.wait(ENDING_S)
            how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        except subprocess.TimeoutExpired:
            how = "closed its output and was killed"
        self.kill()
        deadline = time.monotonic() + ENDING_S
        with contextlib.suppress(TimeoutError):
            while self._selector.get_map():
                self._read(deadline)
        return how + self.last_words()

    def last_words(self) -> str:
        """Return `; its last words: ...` with the end of stderr as far as it was read, or empty text."""
        text = self.stderr[-LAST_WORDS:].decode("utf-8", "replace").strip()
        return f"; its last words: {text}" if text else ""

    def kill(self) -> None:
        """Kill the process and everything it started. `end` must follow."""
        with self._lock:
            if not self._closed:
                self.process.kill()

    def end(self) -> None:
        """Kill the process, wait until it is gone, and close its pipes. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.process.kill()
            self.process.wait()
        self._selector.close()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten bytes of a buffer
                    pipe.close()

    def read_ready(self) -> None:
        """Read what has been written, without waiting: two lines may have come at once, and `stderr` with them."""
        for _ in range(4):  # more than a pipe holds
            if not self._select(0.0):
                return
            del self.stderr[:-LAST_WORDS]

    def _read(self, deadline: float) -> None:
        """Wait for output and read it."""
        left = _seconds_to(deadline)
        if left == 0:
            raise TimeoutError
        self._select(left)

    def _select(self, timeout: float | None) -> bool:
        ready = self._selector.select(timeout)
        for each, _ in ready:
            data = os.read(each.fd, 65_536)
            each.data.extend(data)
            if not data:
                self._selector.unregister(each.fileobj)
        return bool(ready)


def _seconds_to(deadline: float) -> float | None:
    """Return seconds from now until a deadline of `time.monotonic`, at least 0; None for an infinite deadline."""
    return None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
