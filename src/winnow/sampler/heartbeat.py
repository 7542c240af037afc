"""Heartbeat of a sampler during one long call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HEARTBEAT_S = 1.0


@contextmanager
def busy(reply: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Report `busy` from a thread while the body starts an engine or loads weights; the body must not reply itself."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            reply({"busy": True})

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
