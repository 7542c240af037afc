"""Side of a child process: exits with its parent and exchanges lines with it. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when the parent's thread ends, even while a C call holds the interpreter."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def call_itself(name: str) -> None:
    """Set the name shown by Linux's `top` and `ps -o comm`, up to 15 characters."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode())


def lines_with_parent(gone: Callable[[], object]) -> tuple[queue.SimpleQueue[Any], Callable[[str], None]]:
    """Return a queue of the parent's messages, one JSON line each, and a function that writes a line to it.

    Afterwards prints go to stderr, and stdin is empty. `gone` is called when the parent's messages end.
    """
    requests, replies, own = os.fdopen(os.dup(0), "rb"), os.dup(1), os.getpid()
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in requests:
                inbox.put(json.loads(line))
        finally:
            gone()

    def write(text: str) -> None:
        if os.getpid() != own:
            os._exit(0)  # child of a function that forked and continued to here
        data = memoryview(text.encode() + b"\n")
        while data:
            data = data[os.write(replies, data) :]

    threading.Thread(target=read, daemon=True).start()
    return inbox, write
