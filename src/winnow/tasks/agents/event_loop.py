"""One event loop for the async agents of a task, so that they can share a client, a semaphore or a connection pool."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

from ...env.workers.calls import loop_in_thread, warn_from_thread
from ...env.workers.functions import resolved

BLOCKED_S = 1.0
"""Seconds in which no agent starts on the shared loop, after which those that wait for it get a loop each."""


class AgentLoop:
    """Runs coroutines of agents, each awaited by the agent's own thread.

    An agent that blocks the loop, e.g. with a synchronous client, would run alone. When no agent can start for
    `BLOCKED_S`, those that wait therefore get a loop each, with a warning; what they share must then not belong to a
    loop. Many agents that start slowly, each with a client to build, are no block.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked = False
        self._latest_start = 0.0

    def run(self, value: Awaitable[Any], over: Future[None], grace_s: float) -> Any:
        """Return the result of an awaitable. Raises its error.

        `over`: done when its rollout has ended; what still runs on the shared loop `grace_s` later is cancelled.
        """
        if self._blocked:
            return asyncio.run(resolved(value))
        claim, started = threading.Lock(), threading.Event()

        async def begun() -> Any:
            if claim.acquire(blocking=False):
                self._latest_start = time.monotonic()
                started.set()
                return await resolved(value)
            return None

        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(begun(), loop)
        if not self._starts(started) and claim.acquire(blocking=False):
            self._give_up()
            return asyncio.run(resolved(value))

        def cancel_later(_: Future[None]) -> None:
            if not future.done():
                loop.call_soon_threadsafe(loop.call_later, grace_s, future.cancel)

        over.add_done_callback(cancel_later)
        return future.result()

    def _starts(self, started: threading.Event) -> bool:
        """Wait for an agent's start; return False when the loop is blocked."""
        began = time.monotonic()
        left = BLOCKED_S
        while not started.wait(left):
            left = BLOCKED_S - (time.monotonic() - max(began, self._latest_start))
            if left <= 0:
                return False
        return True

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = loop = loop_in_thread("winnow-agents")
                weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
            return self._loop

    def _give_up(self) -> None:
        with self._lock:
            first, self._blocked = not self._blocked, True
        if first:
            warn_from_thread(
                f"{self._label} is async but blocks its event loop (a synchronous client, time.sleep?), so each of its "
                "rollouts gets a loop of its own from now on; use an async client (AsyncOpenAI), or a plain function"
            )
