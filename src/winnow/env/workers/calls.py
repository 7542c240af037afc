"""Calls of Python callables in this process, whose futures finish by a deadline without polling.

A callable in this process cannot be killed. At its deadline the call fails, its thread is abandoned, and later calls
get a new one. A callable that never releases the interpreter lock can still stop everything. Killable code runs in
`winnow.env.workers.worker` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any

MAX_ABANDONED = 16
"""Most abandoned calls; beyond that, further calls fail at once."""
GRACE_S = 1.0
"""Seconds after its deadline that a coroutine may take to be cancelled before its loop is abandoned."""
POLL_S = 0.05


class NotCalledError(TimeoutError):
    """Too many earlier calls hang."""

    def __init__(self) -> None:
        super().__init__(f"not called: {MAX_ABANDONED} earlier calls never returned")


class Owed:
    """A pending result. Only the first outcome counts: the waiting side may have given up or timed out."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def settle(self, function: Callable[[], Any]) -> None:
        """Set the outcome to the value a function returns or the error it raises."""
        try:
            self.succeed(function())
        except BaseException as error:
            self.fail(error)

    def succeed(self, result: Any) -> None:
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # its sys.exit() must not end the waiting side
            error = RuntimeError(f"raised {type(error).__name__}: {error}").with_traceback(error.__traceback__)
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


def converted(
    answer: Future[Any], convert: Callable[[Any], Any], told: Callable[[BaseException], BaseException] = lambda e: e
) -> Future[Any]:
    """Return a future of `convert` applied to another one's result, and of `told` to its error."""
    owed = Owed()

    def settle(done: Future[Any]) -> None:
        if done.cancelled():
            owed.future.cancel()
            return
        error = done.exception()
        if error is None:
            owed.settle(lambda: convert(done.result()))
        else:
            owed.fail(told(error))

    answer.add_done_callback(settle)
    return owed.future


class _Call(Owed):
    def __init__(self, function: Callable[[], Any], grace_s: float = 0.0) -> None:
        super().__init__()
        self.function, self.grace_s = function, grace_s
        self.home: _Lane | _Loop | None = None
        """The thread that runs it."""
        self.started = 0.0

    def begin(self, home: _Lane | _Loop) -> None:
        self.started = time.monotonic()
        self.home = home


class Deadlines:
    """Runs plain callables sequentially in a thread, as most expect, and coroutine functions on an event loop.

    While calls are pending, a separate thread ends those over time. The threads end with the object.
    """

    def __init__(self, timeout_s: float) -> None:
        if not 0 < timeout_s <= 1e6:
            raise ValueError(f"timeout_s must lie in (0, 1e6], not {timeout_s}")
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lane: _Lane | None = None
        self._loop: _Loop | None = None
        self._abandoned: list[threading.Thread] = []
        self._owed: list[_Call] = []
        self._watching = False
        self._closed = False

    def __del__(self) -> None:
        self.close()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        call = _Call(function)
        with self._lock:
            if self._accepts(call):
                if self._lane is None:
                    self._lane = _Lane(self._calls)
                self._calls.put(call)
        return call.future

    def submit_async(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        call = _Call(function, GRACE_S)
        with self._lock:
            if self._accepts(call):
                if self._loop is None:
                    self._loop = _Loop()
                call.begin(self._loop)
                asyncio.run_coroutine_threadsafe(_run(call, self.timeout_s), self._loop.loop)
        return call.future

    def close(self) -> None:
        """Fail all unfinished calls and abandon the running ones."""
        with self._lock:
            self._closed = True
            for call in self._owed:
                call.fail(RuntimeError("not finished: its caller was closed"))
            self._calls.put(None)
            if self._loop is not None:
                self._loop.loop.call_soon_threadsafe(self._loop.loop.stop)
                self._loop = None

    def _accepts(self, call: _Call) -> bool:
        """Watch an accepted call, fail a refused one."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if self._closed:
            call.fail(RuntimeError("not called: its caller was closed"))
        elif len(self._abandoned) >= MAX_ABANDONED:
            call.fail(NotCalledError())
        else:
            self._owed.append(call)
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="winnow-deadlines", daemon=True).start()
        return not call.future.done()

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                self._expire()
                self._owed = [call for call in self._owed if not call.future.done()]
                if not self._owed:
                    self._watching = False
                    return

    def _expire(self) -> None:
        """Fail calls over time; later calls get another thread, or another loop, than the one that they block."""
        limit = time.monotonic() - self.timeout_s
        for call in self._owed:
            if call.home is None or call.started >= limit - call.grace_s or call.future.done():
                continue
            reason = f"took over {self.timeout_s:g} s (its thread cannot be killed and was left behind)"
            call.fail(TimeoutError(reason))
            if call.home is self._lane:
                self._lane.abandoned = True
                self._abandoned.append(self._lane.thread)
                self._lane = _Lane(self._calls)
            elif call.home is self._loop:
                self._abandoned.append(self._loop.thread)
                self._loop = None


class _Lane:
    """A thread that serves calls, until it is abandoned or finds None."""

    def __init__(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        self._calls = calls
        self.abandoned = False
        self.thread = threading.Thread(target=self._serve, name="winnow-calls", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while not self.abandoned and (call := self._calls.get()) is not None:
            if not call.future.done():
                call.begin(self)
                call.settle(call.function)
            del call  # its function may hold the object that owns this thread


class _Loop:
    """A thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="winnow-loop", daemon=True)
        self.thread.start()


async def _run(call: _Call, timeout_s: float) -> None:
    try:
        call.succeed(await asyncio.wait_for(_contained(call.function), timeout_s))
    except TimeoutError as error:
        call.fail(TimeoutError(str(error) or f"took over {timeout_s:g} s"))
    except BaseException as error:
        call.fail(error)


async def _contained(function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return `await function()`. SystemExit or KeyboardInterrupt would end the event loop and all later calls."""
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"raised {type(error).__name__}: {error}").with_traceback(error.__traceback__) from None
