"""Notices user code that sets a signal handler outside the main thread, where Python refuses it.

Such code (math-verify's own timeouts, `signal.alarm` in a tool) often catches the error and returns a wrong answer.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


def _noticed(signalnum: Any, handler: Any) -> Any:
    notice = _notice.get()
    if notice is not None:
        notice()
    return _set_handler(signalnum, handler)
