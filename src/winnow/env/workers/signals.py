"""Notices user code that sets a signal handler outside the main thread, where Python refuses it.

Such code (math-verify's own timeouts, `signal.alarm` in a tool) often catches the error and returns a wrong answer.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .functions import awaited

_attempts: ContextVar[list[int] | None] = ContextVar("attempts", default=None)
_set_handler = signal.signal


@contextmanager
def noticing_signals(name: str, remedy: str) -> Iterator[None]:
    """Where the code inside calls `signal.signal`, warn, and add the remedy to its error as a note.

    Meant for threads other than the main one.
    """
    signal.signal = _noticed
    attempts: list[int] = []
    token = _attempts.set(attempts)
    try:
        yield
    except Exception as error:
        if attempts:
            error.add_note(remedy)
        raise
    finally:
        _attempts.reset(token)
        if attempts:
            warnings.warn(f"{name}: {remedy}", stacklevel=2)


def called_noticing(call: Callable[[], Any], name: str, remedy: str) -> Any:
    """Return a function's result, awaited if necessary."""
    with noticing_signals(name, remedy):
        return awaited(call())


async def awaited_noticing(call: Callable[[], Awaitable[Any]], name: str, remedy: str) -> Any:
    """Await an async function on the current event loop, otherwise like `called_noticing`."""
    with noticing_signals(name, remedy):
        return await call()


def _noticed(signalnum: Any, handler: Any) -> Any:
    attempts = _attempts.get()
    if attempts is not None:
        attempts.append(signalnum)
    return _set_handler(signalnum, handler)
