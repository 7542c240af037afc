"""Ctrl-C and SIGTERM: first finish the step and save, then stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class StopSignals:
    """First SIGINT or SIGTERM: finish the step and save. Second: stop at once (a resume redoes the step)."""

    def __init__(self, request: Callable[[], None]) -> None:
        self._request = request
        self._seen = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self._seen:
            raise KeyboardInterrupt("stopped at once; the step under way was not saved")
        self._seen = True
        self._request()
