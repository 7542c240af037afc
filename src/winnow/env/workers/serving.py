"""Worker side: serves calls from its input until the input ends. See `winnow.env.workers.worker`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from ...base.files import json_default
from ...base.forkserver import die_with, lines_with_parent
from .functions import MAX_REPLY, awaited, describe_error, load_function


def main() -> None:
    """Serve requests in the main thread (so that signals work in user code) until the input ends.

    Arguments: the parent's process id (0 if invisible) and megabytes of memory.
    """
    parent, memory_mb = int(sys.argv[1]), int(sys.argv[2])
    if parent:
        die_with(parent)
    _limit_memory(memory_mb)
    _notice_unset()
    requests, reply = lines_with_parent(lambda: os.killpg(os.getpgrp(), signal.SIGKILL))  # with all it started
    while True:
        _serve_one(requests.get(), reply)


def _serve_one(request: dict[str, Any], reply: Callable[[str], None]) -> None:
    serial, call = request["id"], request["call"]
    try:
        loaded, function = load_function(call["load"]), load_function(call["target"])
        module = sys.modules.get(getattr(loaded, "__module__", ""))
        reply(json.dumps({"id": serial, "loaded": getattr(module, "__file__", None) or ""}))
        result = awaited(function(**call["kwargs"]))
        sys.stdout.flush()
        answer = json.dumps({"id": serial, "result": result, "unset": sorted(_unset)}, default=json_default)
        if len(answer) > MAX_REPLY:
            raise ValueError(f"the result has {len(answer):,} bytes as JSON, over {MAX_REPLY:,}")
    except BaseException as error:
        answer = json.dumps({"id": serial, "error": describe_error(error)})
    reply(answer)


_unset: set[str] = set()
"""Environment variables that look like keys or addresses, and that were read here without being set."""
_SOUGHT = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|URL|ENDPOINT|API")


def _notice_unset() -> None:
    """Remember the names of variables that user code misses: its parent may have them."""
    plain = type(os.environ).__getitem__

    def getitem(environ: Any, name: Any) -> Any:
        try:
            return plain(environ, name)
        except KeyError:
            if isinstance(name, str) and _SOUGHT.search(name):
                _unset.add(name)
            raise

    setattr(type(os.environ), "__getitem__", getitem)  # noqa: B010


def _limit_memory(megabytes: int) -> None:
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
