"""Signal handling: Ctrl-C, SIGTERM or a closed terminal finish the step and save; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

SPEAK_S = 5.0
"""Longest wait for the announcement at the end: the terminal may block."""


class StopSignals:
    """First SIGINT, SIGTERM or SIGHUP: finish the step and save. Second: stop at once (a resume redoes the step).

    A SIGHUP that is ignored, as under `nohup`, stays ignored. `request` runs in the signal handler, between any two
    instructions of the main thread, so it may only set a flag. `announce` prints from a separate thread: in a handler
    it could interrupt another line, or an import that printing needs.
    """

    def __init__(self, request: Callable[[], None], announce: Callable[[], None]) -> None:
        self._request = request
        self._announce = announce
        self._seen = False
        self._previous: dict[int, Any] = {}
        self._signalled: SimpleQueue[bool] = SimpleQueue()  # its put() is safe in a handler
        self._speaker = threading.Thread(target=self._speak, name="winnow-signals", daemon=True)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._speaker.start()
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            self._signalled.put(False)
            self._speaker.join(SPEAK_S)

    def _handle(self, number: int, frame: object) -> None:
        if self._seen:
            raise KeyboardInterrupt("stopped at once; the step under way was not saved")
        self._seen = True
        self._request()
        self._signalled.put(True)

    def _speak(self) -> None:
        while self._signalled.get():
            self._announce()
