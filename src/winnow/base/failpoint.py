"""Named places where a fault can be injected, for the reliability tests. Off unless an environment variable arms one.

`WINNOW_FAILPOINT="name:action"` or `"name@n:action"` (n-th hit, from 1); action is `kill` (SIGKILL), `raise`, `enospc`
or `hang`. `WINNOW_FAILPOINT_LOG=FILE` records every hit, for discovery.
"""

from __future__ import annotations

import errno
import os
import signal
import time

_hits: dict[str, int] = {}


class InjectedFaultError(RuntimeError):
    """Raised by an armed failpoint."""


def failpoint(name: str) -> None:
    """Inject a fault if a test has armed this name."""
    armed, log = os.environ.get("WINNOW_FAILPOINT"), os.environ.get("WINNOW_FAILPOINT_LOG")
    if not (armed or log):
        return
    _hits[name] = _hits.get(name, 0) + 1
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{name}@{_hits[name]}\n")
    where, _, action = (armed or "").partition(":")
    wanted, _, count = where.partition("@")
    if name == wanted and _hits[name] == int(count or 1):
        _act(name, action)


def _act(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, f"injected at {name}: no space left on device")
    elif action == "hang":
        time.sleep(3600)
    else:
        raise InjectedFaultError(f"injected at {name}")
