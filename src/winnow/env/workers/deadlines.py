"""Calls in this process whose futures come to an end by a deadline, without anybody polling."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from .calls import LoopRunner, NotCalledError, ThreadRunner

POLL_S = 0.05


class Deadlines:
    """Plain callables run one after another in a thread, coroutine functions side by side on an event loop.

    A thread of its own ends what is over time while anything is under way. See `calls` for what cannot be ended. The
    threads end with the object.
    """

    def __init__(self, timeout_s: float) -> None:
        if not 0 < timeout_s <= 1e6:
            raise ValueError(f"timeout_s must lie in (0, 1e6], not {timeout_s}")
        self._plain, self._async = ThreadRunner(timeout_s), LoopRunner(timeout_s)
        self._lock = threading.Lock()
        self._owed: list[Future[Any]] = []
        self._watching = False
        weakref.finalize(self, self._plain.close)
        weakref.finalize(self, self._async.close)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        once = [function]  # the thread keeps its last call, which must not keep this object
        with self._lock:
            return self._watched(self._plain.submit(lambda: once.pop()()))

    def submit_async(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        """Raises TimeoutError when too many earlier ones hang."""
        with self._lock:
            future = self._async.submit(function)
            if future.done() and isinstance(error := future.exception(), NotCalledError):
                raise TimeoutError(str(error))
            return self._watched(future)

    def _watched(self, future: Future[Any]) -> Future[Any]:
        self._owed.append(future)
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="winnow-deadlines", daemon=True).start()
        return future

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                self._plain.expire()
                self._async.expire()
                self._owed = [future for future in self._owed if not future.done()]
                if not self._owed:
                    self._watching = False
                    return
