"""Errors of tools that are not the model's fault: they fail the rollout, all others are shown to the model."""

from __future__ import annotations

import errno
import socket
from itertools import islice

from .workers.remote import EnvLostError
from .workers.worker import WorkerError

MOST_CAUSES = 32
"""Errors behind an error that are looked at."""
ERRNOS = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
ERRNOS |= {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""The network is away, or this machine has no files or memory left. A host name that does not exist may be the model's
invention, and a full disk its work."""
CLIENTS = ("httpx", "httpcore", "aiohttp")
LOST = {"TimeoutException", "RemoteProtocolError", "ServerDisconnectedError"}
"""Errors of `CLIENTS` for timeouts and lost connections that may have no cause."""


class ToolUnavailableError(RuntimeError):
    """A call failed for a reason that is not the model's. Raised by tools; the rollout fails."""


NOT_THE_MODELS_FAULT = (ToolUnavailableError, EnvLostError, WorkerError, TimeoutError, ConnectionError, MemoryError)


def is_unavailable(error: BaseException) -> bool:
    """Return whether an error, or one behind it, is not the model's fault: HTTP clients raise errors of their own."""
    errors = [error]
    for each in islice(errors, MOST_CAUSES):  # the list grows; an error may be raised from itself
        if isinstance(each, NOT_THE_MODELS_FAULT) or (isinstance(each, OSError) and each.errno in ERRNOS):
            return True
        if isinstance(each, socket.gaierror) and each.errno == socket.EAI_AGAIN:
            return True
        if any(kind.__name__ in LOST and kind.__module__.startswith(CLIENTS) for kind in type(each).__mro__):
            return True
        errors += _behind(each)
    return False


def _behind(error: BaseException) -> list[BaseException]:
    behind = [] if not isinstance(error, BaseExceptionGroup) else list(error.exceptions)
    hidden = error.__suppress_context__ and not type(error).__module__.startswith("httpcore")  # it hides all causes
    cause = error.__cause__ or (None if hidden else error.__context__)
    return behind if cause is None else [*behind, cause]
