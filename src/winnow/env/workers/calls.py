"""Calls of Python callables in this process under a deadline: plain functions in a thread, coroutines on a loop.

A callable in this process cannot be killed. When its time is up its call fails, its thread is left behind, and later
calls get a new one; a callable that never releases the interpreter lock can still stop everything. What must be
killable runs in `winnow.env.workers.worker` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

MAX_ABANDONED = 16
"""Calls that may hang at once; with that many left behind, further calls fail at once."""
GRACE_S = 1.0
"""Seconds after its deadline that a coroutine may take to be cancelled before its loop is given up."""


@dataclass
class _Call:
    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    started: float | None = None

    def run(self) -> None:
        self.started = time.monotonic()
        try:
            result = self.function()
        except BaseException as error:
            self.fail(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # sys.exit() in there must not end whoever asks for the result
            error = RuntimeError(f"raised {type(error).__name__}: {error}").with_traceback(error.__traceback__)
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class NotCalledError(RuntimeError):
    """Too many earlier calls hang."""

    def __init__(self) -> None:
        super().__init__(f"not called: {MAX_ABANDONED} earlier calls never returned")


class ThreadRunner:
    """Runs plain callables one after another in one thread, as most reward functions expect."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lane = _Lane()
        self._abandoned: list[_Lane] = []
        self._closed = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        call = _Call(function)
        if self._closed:
            call.fail(RuntimeError("not called: the rewarder was closed"))
        elif len(self._abandoned) >= MAX_ABANDONED:
            call.fail(NotCalledError())
        else:
            self._lane.put(call)
        return call.future

    def expire(self) -> None:
        """Fail the running call if its time is up; those behind it move to a new thread."""
        self._abandoned = [lane for lane in self._abandoned if lane.alive()]
        current = self._lane.current
        if current is None or current.started is None or time.monotonic() - current.started <= self.timeout_s:
            return
        current.fail(TimeoutError(f"took over {self.timeout_s:g} s (its thread cannot be killed and was left behind)"))
        old, self._lane = self._lane, _Lane()
        self._abandoned.append(old)
        for call in old.retire():
            self._lane.put(call)

    def close(self) -> None:
        self._closed = True
        for call in self._lane.retire():
            call.fail(RuntimeError("not called: the rewarder was closed"))


class _Lane:
    """A thread and its queue."""

    def __init__(self) -> None:
        self.current: _Call | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: _Call) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="winnow-reward", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def retire(self) -> list[_Call]:
        """End the thread once its current call returns; returns the calls that were not begun."""
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


class LoopRunner:
    """Runs coroutine functions side by side on an event loop in a thread of its own."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: list[_Call] = []
        self._given_up = 0

    def submit(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        call = _Call(function, started=time.monotonic())
        if self._given_up >= MAX_ABANDONED:
            call.fail(NotCalledError())
            return call.future
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="winnow-reward-loop", daemon=True).start()
        self._running.append(call)
        asyncio.run_coroutine_threadsafe(self._run(call), self._loop)
        return call.future

    def expire(self) -> None:
        """Fail calls that outlived even their cancellation: something blocks the loop, so later calls get a new one."""
        self._running = [call for call in self._running if not call.future.done()]
        limit = time.monotonic() - self.timeout_s - GRACE_S
        late = [call for call in self._running if call.started is not None and call.started < limit]
        for call in late:
            call.fail(TimeoutError(f"took over {self.timeout_s:g} s and could not be cancelled"))
        if late:
            self._given_up += 1
            self._loop = None

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        for call in self._running:
            call.fail(RuntimeError("not finished: the rewarder was closed"))

    async def _run(self, call: _Call) -> None:
        try:
            result = await asyncio.wait_for(_contained(call.function), self.timeout_s)
        except TimeoutError as error:
            call.fail(TimeoutError(str(error) or f"took over {self.timeout_s:g} s"))
        except BaseException as error:
            call.fail(error)
        else:
            with contextlib.suppress(InvalidStateError):
                call.future.set_result(result)


async def _contained(function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """`await function()`. An event loop ends by what ends a program, and with it all later calls."""
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"raised {type(error).__name__}: {error}").with_traceback(error.__traceback__) from None
