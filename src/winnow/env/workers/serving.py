"""The side of a worker process: serves calls from its input until that ends. See `winnow.env.workers.worker`."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from ...base.parent import die_with
from .functions import awaited, describe_error, json_default, load_function


def main() -> None:
    """Serve requests in the main thread (so that signals work there) until the input ends.

    Arguments: the parent's process id, 0 where it cannot be seen, and megabytes of memory.
    """
    parent, memory_mb = int(sys.argv[1]), int(sys.argv[2])
    if parent:
        die_with(parent)
    _limit_memory(memory_mb)
    requests_fd, replies_fd = os.dup(0), os.dup(1)
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)
    os.dup2(2, 1)
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests_fd, requests), daemon=True).start()
    while True:
        _serve_one(json.loads(requests.get()), replies_fd)


def _serve_one(request: dict[str, Any], replies_fd: int) -> None:
    serial, call, worker = request["id"], request["call"], os.getpid()
    try:
        function = load_function(call["target"])
        _reply(worker, replies_fd, {"id": serial, "loaded": True})
        reply = json.dumps({"id": serial, "result": awaited(function(**call["kwargs"]))}, default=json_default)
    except BaseException as error:
        reply = json.dumps({"id": serial, "error": describe_error(error)})
    _reply(worker, replies_fd, reply)


def _reply(worker: int, fd: int, reply: str | dict[str, Any]) -> None:
    if os.getpid() != worker:
        os._exit(0)  # a function that forked, whose child went on to here
    data = memoryview(((reply if isinstance(reply, str) else json.dumps(reply)) + "\n").encode())
    while data:
        data = data[os.write(fd, data) :]


def _read_requests(fd: int, requests: queue.Queue[bytes]) -> None:
    """Hand on whole lines; at the end of the input end this process and all it started."""
    with open(fd, "rb") as stream:
        for line in stream:
            requests.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _limit_memory(megabytes: int) -> None:
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
