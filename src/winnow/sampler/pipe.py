"""A sampler process as the learner sees it: JSON lines both ways, a tail of what it printed, an end for certain.

Neither side ever waits for the other to read: threads do.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections import deque
from typing import Any

from ..base.forkserver import Child, ForkServer, forkserver
from .handle import Inbox, Message

LAST_WORDS = 40
"""Lines of a sampler's prints that are kept."""


class Pipe:
    """One process; what it says goes into `inbox`, its end, too. It dies with this process."""

    def __init__(self, inbox: Inbox, process: Child) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said: deque[str] = deque(maxlen=LAST_WORDS)
        self.process = process
        self._threads = [
            threading.Thread(target=self._listen, args=(inbox,), daemon=True),
            threading.Thread(target=self._overhear, daemon=True),
            threading.Thread(target=self._talk, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, content: dict[str, Any]) -> None:
        self._outbox.put(json.dumps(content).encode() + b"\n")

    def kill(self) -> str:
        """End it now, if it has not ended, with everything it started; returns how it ended and what it said last."""
        self.process.kill()
        status = self.process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        said = "\n".join(self._said).strip()
        return how + (f"; its last words:\n{said[-2000:]}" if said else "")

    def _listen(self, inbox: Inbox) -> None:
        if self.process.pid:  # what it imports comes first
            inbox.put(Message(self, {"placed": ""}))
        with contextlib.suppress(ValueError, OSError):  # a line cut off by its death, or our own closing
            for line in self.process.stdout:
                inbox.put(Message(self, json.loads(line)))
        inbox.put(Message(self, None))

    def _overhear(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stderr:
                self._said.append(line.decode("utf-8", "replace").rstrip())

    def _talk(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while (line := self._outbox.get()) is not None:
                self.process.stdin.write(line)
                self.process.stdin.flush()


class Pipes:
    """Starts samplers on this machine; what they import is imported once, until `close`."""

    def __init__(self, threads: int, entry: str) -> None:
        """`entry`: function to run in each, `module:function`."""
        self._threads, self._entry = threads, entry
        self._server: ForkServer | None = None

    def __call__(self, inbox: Inbox) -> Pipe:
        paths = dict.fromkeys([*(os.path.abspath(p) for p in sys.path), os.getcwd()])
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(self._threads)}
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # what imports ask of CUDA must not start it: samplers are forked
        self._server = forkserver(self._entry, env)
        return Pipe(inbox, self._server.fork())

    def close(self) -> None:
        self._server = None
