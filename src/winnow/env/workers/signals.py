"""Notices user code that sets a signal handler outside the main thread, where Python refuses it.

Such code (math-verify's own timeouts, `signal.alarm` in a tool) often catches the error and returns a wrong answer.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .functions import awaited, resolved

_notice: ContextVar[Callable[[], None] | None] = ContextVar("notice", default=None)
_set_handler = signal.signal


@contextmanager
def noticing_signals(notice: Callable[[], None]) -> Iterator[None]:
    """Call `notice` when the code inside calls `signal.signal`. Meant for threads other than the main one."""
    signal.signal = _noticed
    token = _notice.set(notice)
    try:
        yield
    finally:
        _notice.reset(token)


def called_noticing(call: Callable[[], Any], notice: Callable[[], None]) -> Any:
    """Return a function's result, awaited if necessary."""
    with noticing_signals(notice):
        return awaited(call())


async def awaited_noticing(call: Callable[[], Awaitable[Any]], notice: Callable[[], None]) -> Any:
    """Await an async function on the current event loop, otherwise like `called_noticing`."""
    with noticing_signals(notice):
        return await resolved(call())


def _noticed(signalnum: Any, handler: Any) -> Any:
    notice = _notice.get()
    if notice is not None:
        notice()
    return _set_handler(signalnum, handler)
