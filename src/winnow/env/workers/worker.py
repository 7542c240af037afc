"""Killable worker processes: any function by name, with a deadline enforced by the parent.

A worker is for code that may hang, crash or fill its memory, such as verifiers that evaluate model output. It is not a
sandbox: it runs as the same user. It cannot stop the parent, or run code in it: the two exchange JSON lines over pipes,
sizes are capped, and the parent kills the worker's process group at the deadline.

    parent -> worker   {"id": 7, "call": {"load": "module:function", "target": "module:function", "kwargs": {...}}}
    worker -> parent   {"id": 7, "loaded": true}            both are imported; the deadline of the call starts now
                       {"id": 7, "result": ..., "unset": ["A_KEY"]} or {"id": 7, "error": "ValueError: ..."}

A worker sees a small environment without secrets. The tail of its prints is quoted when it crashes. It ends with its
parent: at the end of its input, and on Linux by a signal of the kernel even when it is stuck in C code.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ...base.child import Child, GroupProcess
from ...base.files import json_default, sha256
from .bwrap_worker import Cage
from .calls import Owed, warn_from_thread
from .functions import MAX_REPLY

START_TIMEOUT_S = 120.0
"""Seconds for starting the process and importing the function's module."""
PASSED_ENV = ("PATH", "LANG", "LC_ALL", "TMPDIR", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
THREADS_ENV = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Kind = Literal["timeout", "died", "raised"]


class WorkerError(RuntimeError):
    """A call without a result: it timed out, its process crashed, or the function raised."""

    def __init__(self, kind: Kind, detail: str, target: str = "") -> None:
        super().__init__(f"{target}: {detail}" if target else detail)
        self.kind = kind
        self.detail = detail


class WorkerPool:
    """`size` worker processes, started at the first call and restarted after a crash.

    `timeout_s` bounds one call from the moment its function is imported; `memory_mb` bounds a worker's data segment
    (Linux). Workers see the environment variables `env` and those without secrets, and run in `cage` if given.
    Thread-safe. Close it, or leave it to the end of the program.
    """

    def __init__(
        self,
        size: int = 2,
        timeout_s: float = 30.0,
        *,
        memory_mb: int = 4_096,
        env: Sequence[str] = (),
        cage: Cage | None = None,
    ) -> None:
        if size < 1 or not 0 < timeout_s <= 1e6 or memory_mb < 64:
            raise ValueError("WorkerPool: size from 1, timeout_s in (0, 1,000,000], memory_mb from 64")
        self.size, self.timeout_s, self.memory_mb = size, timeout_s, memory_mb
        self._env, self._cage = tuple(env), cage
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.printed: dict[str, str] = {}
        """What each function printed in its latest call."""
        self.unset: dict[str, list[str]] = {}
        """Environment variables that look like keys or addresses, and that each function's process missed."""
        self._read: dict[str, str] = {}
        """Digest of each file of a function, as the latest process has read it."""
        _open_pools.add(self)

    def call(self, target: str, kwargs: Mapping[str, Any], *, called: str = "") -> Future[Any]:
        """Queue `target(**kwargs)`; the future holds its JSON result or raises WorkerError.

        `called`: the user's function by name, if `target` calls it. Its import is no part of `timeout_s` either, and
        WorkerError names it. Raises TypeError when `kwargs` is not JSON, RuntimeError when the pool is closed.
        """
        called = called or target
        body = json.dumps({"load": called, "target": target, "kwargs": dict(kwargs)}, default=json_default)
        job = _Job(body, called)
        with self._lock:
            if self._closed:
                raise RuntimeError("WorkerPool: the pool is closed")
            while len(self._threads) < self.size:
                self._start_thread()
            self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Kill all workers; unfinished calls fail with kind `died`. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.kill()
        for _ in self._threads:  # they fail what is queued before
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)

    def _start_thread(self) -> None:
        slot = len(self._workers)
        worker = _Worker(lambda: _spawn(self.memory_mb, self._env, self._cage, slot), self._read)
        thread = threading.Thread(target=self._serve, args=(worker,), name="winnow-worker", daemon=True)
        self._workers.append(worker)
        self._threads.append(thread)
        thread.start()

    def _serve(self, worker: _Worker) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.done() and job.future.set_running_or_notify_cancel():
                self._do(job, worker)
            del job  # its callbacks may hold the pool
        worker.end()

    def _do(self, job: _Job, worker: _Worker) -> None:
        try:
            if self._closed:
                raise WorkerError("died", "the worker pool was closed")
            result = worker.run(job, self.timeout_s)
        except WorkerError as error:
            job.fail(error)
        except Exception as error:  # on any error: the caller must not wait for ever
            worker.end()
            job.fail(WorkerError("died", f"no worker process could be used: {type(error).__name__}: {error}"))
        else:
            self.printed[job.called], self.unset[job.called] = worker.printed, worker.unset
            job.succeed(result)


class _Job(Owed):
    def __init__(self, body: str, called: str) -> None:
        super().__init__()
        self.body, self.called = body, called


class _Worker:
    """One process at a time, used by one thread; any thread may `kill`."""

    def __init__(self, spawn: Callable[[], Child], read: dict[str, str]) -> None:
        self._spawn, self._read = spawn, read
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._killed = False
        self._serial = 0
        self._imported: set[str] = set()
        self.printed = ""
        """The end of what the latest call printed."""
        self.unset: list[str] = []
        """Environment variables that the process missed."""

    def run(self, job: _Job, timeout_s: float) -> Any:
        """Run one job. Raises WorkerError; the process is then gone unless the function merely raised."""
        child = self._running()
        child.stderr.clear()
        self._serial += 1
        request = f'{{"id": {self._serial}, "call": {job.body}}}\n'.encode()
        start_s = timeout_s if job.called in self._imported else START_TIMEOUT_S
        late = f"could not be imported in {start_s:g} s"
        deadline = time.monotonic() + start_s
        try:
            child.send(request, deadline)
            file = str(self._expect("loaded", child, deadline))
            if job.called not in self._imported:
                self._imported.add(job.called)
                self._warn_if_edited(file)
            late = f"took over {timeout_s:g} s"
            result = self._expect("result", child, time.monotonic() + timeout_s)
            child.read_ready()
            self.printed = child.stderr.decode("utf-8", "replace").strip()
            return result
        except WorkerError as error:
            raise WorkerError(error.kind, error.detail, job.called) from None
        except TimeoutError:
            failure = WorkerError("timeout", f"{late}; the worker was killed{child.last_words()}", job.called)
        except EOFError:
            closed = "the worker pool was closed"
            failure = WorkerError("died", closed if self._killed else f"the worker died ({child.ending()})", job.called)
        except ValueError as garbled:
            failure = WorkerError("died", f"{garbled}; the worker was killed", job.called)
        self.end()
        raise failure

    def kill(self) -> None:
        """End the process for good. Any thread may call it; the serving thread then cleans up with `end`."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def end(self) -> None:
        """Kill the process with all it started, and close its pipes."""
        with self._lock:
            if self._child is not None:
                self._child.end()
                self._child = None

    def _running(self) -> Child:
        """Return the running process; start one if it is missing or has exited."""
        if self._child is not None and self._child.exited:
            self.end()
        with self._lock:
            if self._killed:
                raise WorkerError("died", "the worker pool was closed")
            if self._child is None:
                self._imported.clear()
                self._child = self._spawn()
            return self._child

    def _warn_if_edited(self, file: str) -> None:
        """Warn if this process has imported a file that an earlier one has read with other contents."""
        path = Path(file)
        with contextlib.suppress(OSError):
            now = sha256(path) if path.suffix == ".py" and path.is_file() else ""
            if self._read.setdefault(file, now) != now:
                self._read[file] = now
                warn_from_thread(
                    f"{file} has changed since the run began: a new worker process has read it as it is now, and "
                    "others go on with what they read before; restore it, or stop the run and resume it"
                )

    def _expect(self, key: str, child: Child, deadline: float) -> Any:
        """Return `key` of the next reply. Raises WorkerError for an error, ValueError for a garbled reply."""
        line = child.line(deadline, MAX_REPLY)
        try:
            reply = json.loads(line)
            if reply["id"] != self._serial:
                raise KeyError("id")
            value = reply["error"] if "error" in reply else reply[key]
            self.unset = [str(name) for name in reply.get("unset", ())]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"garbled reply {line[:80]!r}") from None
        if "error" in reply:
            raise WorkerError("raised", str(value))
        return value


def _spawn(memory_mb: int, env: Sequence[str], cage: Cage | None, slot: int) -> Child:
    values = worker_environment() | {name: os.environ[name] for name in env}
    # A worker in a cage cannot see its parent; bubblewrap then ends it.
    command = [sys.executable, "-m", "winnow.env.workers.serving", str(0 if cage else os.getpid()), str(memory_mb)]
    if cage is None:
        return Child(GroupProcess(command, env=values))
    with contextlib.ExitStack() as files:
        command, options = cage.around(slot, command, values, files)
        return Child(GroupProcess(command, **options))


def worker_environment() -> dict[str, str]:
    """Return an environment without secrets: paths to import from, one thread, and switches that keep it offline."""
    env = {name: os.environ[name] for name in PASSED_ENV if name in os.environ}
    paths = [os.path.abspath(p) for p in sys.path] + [os.getcwd()]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if os.path.exists(p)))
    env["PYTHONHASHSEED"] = "0"
    return env | dict.fromkeys(THREADS_ENV, "1")


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@cache
def shared_pool() -> WorkerPool:
    """Return the default pool."""
    return WorkerPool()


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()
