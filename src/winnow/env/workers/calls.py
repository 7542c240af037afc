"""Calls of Python callables in this process, whose futures finish by a deadline without polling.

A callable in this process cannot be killed. At its deadline the call fails, its thread is abandoned, and later calls
get a new one. A callable that never releases the interpreter lock can still stop everything. Killable code runs in
`winnow.env.workers.worker` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import signal
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from .functions import resolved

MAX_ABANDONED = 16
"""Most abandoned calls; beyond that, further calls fail at once."""
GRACE_S = 1.0
"""Seconds after its deadline that a coroutine may take to be cancelled before its loop is abandoned."""
OVERLAP_S = 10.0
"""Seconds after which a call that may wait for another one's effect no longer holds up those behind it; while one does,
`POLL_S` for the next."""
OVERLAPS = (
    f"a tool or environment takes over {OVERLAP_S:g} s, so the others run in other threads meanwhile. Objects that "
    "belong to a thread fail there: open sqlite3 connections with check_same_thread=False"
)
ASYNC_TIMEOUT_S = 600.0
"""Seconds that an async method of a plain `Env` may take."""
POLL_S = 0.05


def warn_from_thread(text: str) -> None:
    """Warn in a thread that others wait for: where warnings are errors, none may end it."""
    with contextlib.suppress(UserWarning):
        warnings.warn(text, stacklevel=3)


class Owed:
    """A pending result. Only the first outcome counts: the waiting side may have given up or timed out."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def complete(self, function: Callable[[], Any]) -> None:
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
    answer: Future[Any],
    convert: Callable[[Any], Any],
    convert_error: Callable[[BaseException], BaseException] = lambda e: e,
) -> Future[Any]:
    """Return a future of `convert` applied to another one's result, and of `convert_error` to its error."""
    owed = Owed()

    def complete(done: Future[Any]) -> None:
        if done.cancelled():
            owed.future.cancel()
            return
        error = done.exception()
        if error is None:
            owed.complete(lambda: convert(done.result()))
        else:
            owed.fail(convert_error(error))

    answer.add_done_callback(complete)
    return owed.future


class _Call(Owed):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function
        self.started: float | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        self.started = time.monotonic()
        self.complete(self.function)


class Deadlines:
    """Runs plain callables sequentially in a thread, as most expect, and coroutine functions on an event loop.

    While calls are pending, a separate thread ends those over time. The threads end with the object. `overlapping`: a
    call that takes over `OVERLAP_S` goes on in its thread while those behind it run in another: it may wait for
    something that one of them gives back.
    """

    def __init__(self, timeout_s: float, *, overlapping: bool = False) -> None:
        if not 0 < timeout_s <= 1e6:
            raise ValueError(f"timeout_s must lie in (0, 1e6], not {timeout_s}")
        self.timeout_s = timeout_s
        self._overlapping = overlapping
        self._overtaken: list[_Lane] = []
        self._lock = threading.Lock()
        self._lane = _Lane()
        self._abandoned: list[_Lane] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked_loops: set[asyncio.AbstractEventLoop] = set()
        self._owed: list[_Call] = []
        self._watching = False
        self._closed = False

    def __del__(self) -> None:
        try:
            self.close()
        except (AttributeError, TypeError):  # modules may be gone at the interpreter's end
            return

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        call = _Call(function)
        with self._lock:
            self._abandoned = [lane for lane in self._abandoned if lane.alive()]
            if self._accepts(call, len(self._abandoned)):
                self._lane.put(call)
        return call.future

    def submit_async(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        call = _Call(function)
        with self._lock:
            if self._accepts(call, len(self._blocked_loops)):
                if self._loop is None:
                    self._loop = loop_in_thread("winnow-loop")
                call.loop, call.started = self._loop, time.monotonic()
                asyncio.run_coroutine_threadsafe(_run(call, self.timeout_s), self._loop)
        return call.future

    def awaited(self, value: Awaitable[Any]) -> Future[Any]:
        """Await a value on the event loop."""
        return self.submit_async(partial(resolved, value))

    def close(self) -> None:
        """Fail all unfinished calls and abandon the running ones."""
        with self._lock:
            self._closed = True
            for call in self._owed:
                call.fail(RuntimeError("not finished: its caller was closed"))
            for lane in (self._lane, *self._overtaken):
                lane.retire()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _accepts(self, call: _Call, hanging: int) -> bool:
        """Watch an accepted call, fail a refused one."""
        if self._closed:
            call.fail(RuntimeError("not called: its caller was closed"))
        elif hanging >= MAX_ABANDONED:
            call.fail(TimeoutError(f"not called: {MAX_ABANDONED} earlier calls never returned"))
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
        limit = time.monotonic() - self.timeout_s
        for lane in (self._lane, *self._overtaken):
            if lane.busy_since() < limit:
                self._fail(lane)
        self._overtaken = [lane for lane in self._overtaken if lane.current is not None]
        patience = POLL_S if self._overtaken else OVERLAP_S
        if self._overlapping and self._lane.busy_since() < time.monotonic() - patience:
            if not self._overtaken:
                warn_from_thread(OVERLAPS)
            self._overtaken.append(self._lane)
            self._next_lane()
        for call in self._owed:
            late = call.loop is not None and call.started is not None and call.started < limit - GRACE_S
            if late and not call.future.done():
                call.fail(TimeoutError(f"took over {self.timeout_s:g} s and could not be cancelled"))
                self._leave(call.loop)

    def _leave(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Give later calls a new loop. The old one counts as blocked until it runs again, and ends after its calls."""
        if loop is None or loop is not self._loop:
            return
        self._loop = None
        self._blocked_loops.add(loop)
        loop.call_soon_threadsafe(self._blocked_loops.discard, loop)
        loop.call_soon_threadsafe(loop.call_later, self.timeout_s + GRACE_S, loop.stop)

    def _fail(self, lane: _Lane) -> None:
        """Fail the call that a lane runs, and leave the lane."""
        current = lane.current
        if current is None:
            return
        current.fail(TimeoutError(f"took over {self.timeout_s:g} s (its thread cannot be killed and was left behind)"))
        self._abandoned.append(lane)
        if lane is self._lane:
            self._next_lane()
        else:
            self._overtaken.remove(lane)

    def _next_lane(self) -> None:
        """Run the calls behind the current one in a thread of their own."""
        waiting = self._lane.retire()
        self._lane = _Lane()
        for call in waiting:
            self._lane.put(call)


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """Return a new event loop that runs in a thread until it is stopped."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


@cache
def shared_calls() -> Deadlines:
    """Return the event loop of environments whose methods are async."""
    return Deadlines(ASYNC_TIMEOUT_S)


class _Lane:
    """A thread and its queue."""

    def __init__(self) -> None:
        self.current: _Call | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: _Call) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="winnow-calls", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def busy_since(self) -> float:
        """Return the time at which the current call began; infinity without one."""
        current = self.current
        return math.inf if current is None or current.started is None else current.started

    def retire(self) -> list[_Call]:
        """End the thread once its current call returns; return the calls not yet started."""
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    left.append(call)
        self._calls.put(None)
        return left

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self.current = call
            call.run()
            self.current = None
            del call  # its function may hold the object that owns this thread


async def _run(call: _Call, timeout_s: float) -> None:
    """Complete a call. All errors end here: SystemExit or KeyboardInterrupt would end the loop and later calls."""
    try:
        async with asyncio.timeout(timeout_s):
            call.succeed(await call.function())
    except TimeoutError as error:
        call.fail(TimeoutError(str(error) or f"took over {timeout_s:g} s"))
    except BaseException as error:
        call.fail(error)


_notice: ContextVar[Callable[[], None] | None] = ContextVar("notice", default=None)
_set_handler = signal.signal


@contextlib.contextmanager
def noticing_signals(notice: Callable[[], None]) -> Iterator[None]:
    """Call `notice` when the code inside calls `signal.signal`, which Python refuses outside the main thread.

    User code that sets a handler (math-verify's own timeouts, `signal.alarm` in a tool) often catches the error and
    returns a wrong answer.
    """
    signal.signal = _noticed
    token = _notice.set(notice)
    try:
        yield
    finally:
        _notice.reset(token)


def _noticed(signalnum: Any, handler: Any) -> Any:
    notice = _notice.get()
    if notice is not None:
        notice()
    return _set_handler(signalnum, handler)
