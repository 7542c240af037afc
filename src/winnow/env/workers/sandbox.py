"""Runs model-written Python in bubblewrap: no network, no files but /usr, no privileges, bounded resources.

Resource limits apply within `bubblewrap`. The parent watches the wall clock and the amount of output, and everything
inside exits with its first process. The sum over a program's processes is unbounded: up to `processes` of them may use
`memory_mb` each.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

from ...base.child import Child, GroupProcess
from .bubblewrap import SandboxError, bubblewrapped, slot_user, temporary, util_linux
from .seccomp import program
from .worker import THREADS_ENV

NAMESPACES = (
    "it needs unprivileged user namespaces: sysctl kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns, user.max_user_namespaces"
)
MAX_OPTION = 1_000_000
"""Largest value of an option; beyond it the system's calls for times and limits overflow."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin"} | dict.fromkeys(THREADS_ENV, "1")
"""Variables of a program. A thread for each core, which numpy's library starts, would exceed `processes`."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program. Nothing in it is a verdict: the program controls all of it, exit status included."""

    stdout: str
    stderr: str
    exit_code: int | None
    """128 + n for a program ended by signal n; None if it was stopped from outside."""
    timed_out: bool = False
    truncated: bool = False
    """Whether the program wrote more than `max_output` and was stopped."""


@dataclass(frozen=True)
class SandboxOptions:
    timeout_s: float = 10.0
    memory_mb: int = 256
    """Address space of one process."""
    processes: int = 16
    """Processes and threads at once."""
    disk_mb: int = 16
    """Megabytes of files in /tmp, which are in memory."""
    files: int = 1_024
    """Files and directories in /tmp; each costs the kernel about a kilobyte."""
    max_output: int = 65_536
    """Bytes of stdout and of stderr."""
    slots: int = 2
    """Concurrent programs; others wait."""
    python: str = "/usr/bin/python3"
    """Interpreter inside. One outside /usr is mounted with its installation, read-only."""
    unsafe: bool = False
    """Run without a sandbox, with resource limits only. For machines that are sandboxes themselves."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mb", "processes", "disk_mb", "files", "max_output", "slots"):
            if not 0 < getattr(self, name) <= MAX_OPTION:
                raise ValueError(f"sandbox: {name} must lie in (0, {MAX_OPTION:,}], not {getattr(self, name)}")
        if self.unsafe and self.python != SandboxOptions.python:
            raise ValueError("sandbox: unsafe programs run in Winnow's own interpreter; remove python, or unsafe")


class Sandbox:
    """Pool of sandboxes, thread-safe. Raises SandboxError at once when this machine cannot contain programs."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self._command = [] if self.options.unsafe else _contained(self.options)
        self._limits = _limits(self.options)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.options.slots):
            self._slots.put(slot)
        self._threads = ThreadPoolExecutor(self.options.slots, thread_name_prefix="winnow-sandbox")
        self._running: dict[_Program, Child] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._probe()

    def start(self, code: str) -> Future[Outcome]:
        """Run a program; its future finishes by a deadline, with SandboxError if the sandbox did not start."""
        return self._threads.submit(self.run, code)

    def run(self, code: str) -> Outcome:
        slot = self._slots.get()
        with contextlib.ExitStack() as held:
            held.callback(self._slots.put, slot)
            process = self._begin(slot, code, held)
            return self._outcome(process, self._running[process])

    def close(self) -> None:
        """Kill running programs. Safe to call twice."""
        with self._lock:
            self._closed = True
            running = list(self._running.values())
        for child in running:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, slot: int, code: str, held: contextlib.ExitStack) -> _Program:
        """Start a program that ends with `held`."""
        o = self.options
        source = temporary(held, code.encode("utf-8", "surrogatepass"))
        status = temporary(held)
        options: dict[str, Any] = {"stdin": source}
        command = [*self._limits, sys.executable, "-I", "-"]
        if not o.unsafe:
            passed = [file.fileno() for file in (source, temporary(held, program()), status)]
            options = {"stdin": subprocess.DEVNULL, "pass_fds": passed, **slot_user(slot)}
            code_fd, filter_fd, status_fd = map(str, passed)
            given = ["--perms", "0444", "--file", code_fd, "/tmp/main.py", "--seccomp", filter_fd]
            given += ["--json-status-fd", status_fd, "--remount-ro", "/", "--"]
            command = [*self._command, *given, *self._limits, o.python, "-I", "/tmp/main.py"]
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox was closed")
            process = _Program(status, command, env=ENVIRONMENT, cwd="/", **options)
            child = self._running[process] = Child(process)
        held.callback(self._running.pop, process)
        held.callback(child.end)
        return process

    def _outcome(self, process: _Program, child: Child) -> Outcome:
        """Return the outcome. Raises SandboxError if the program never started or was killed by `close`."""
        o, stopped, status = self.options, "", None
        try:
            status = child.finish(time.monotonic() + o.timeout_s, o.max_output)
        except TimeoutError:
            stopped = "time"
        except ValueError:
            stopped = "output"
        stdout, stderr = (data[: o.max_output].decode("utf-8", "replace") for data in (child.stdout, child.stderr))
        if stopped:
            return Outcome(stdout, stderr, None, timed_out=stopped == "time", truncated=stopped == "output")
        if self._closed:  # bubblewrap may still have reported its child's exit
            raise SandboxError("the sandbox was closed")
        if not o.unsafe and (status := process.reported("exit-code")) is None:
            why = f"{stderr.strip()[-300:]} ({NAMESPACES})" if stderr.strip() else "it was killed"
            raise SandboxError(f"sandbox: could not be started: {why}")
        assert status is not None
        return Outcome(stdout, stderr, status if status >= 0 else 128 - status)

    def _probe(self) -> None:
        """Check that a first program succeeds and cannot see this machine's files."""
        outcome = self.run("import os\nprint(6 * 7, os.path.exists('/etc'), os.getpid())")
        expected = None if self.options.unsafe else "42 False 1\n"
        if outcome.exit_code != 0 or (expected and outcome.stdout != expected):
            output = outcome.stderr.strip() or outcome.stdout.strip() or f"exit status {outcome.exit_code}"
            raise SandboxError(
                f"sandbox: a first program did not come through: {output[-300:]}. Is {self.options.python} there, and "
                "readable for everybody?"
            )


class _Program(GroupProcess):
    """bubblewrap, or the unsafe program itself. `status`: bubblewrap's report file."""

    def __init__(self, status: IO[bytes], command: list[str], **options: Any) -> None:
        self._status = status
        super().__init__(command, **options)

    def reported(self, key: str) -> int | None:
        """Return bubblewrap's report: `child-pid` once the child runs, `exit-code` at the end."""
        text = os.pread(self._status.fileno(), 65_536, 0).decode("utf-8", "replace")
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                if key in (report := json.loads(line)):
                    return int(report[key])
        return None

    def kill(self) -> None:
        """Kill the first process inside, which ends all others, and bubblewrap itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.poll() is None and (inside := self.reported("child-pid")) is not None:
                os.kill(inside, signal.SIGKILL)
        super().kill()


def _contained(o: SandboxOptions) -> list[str]:
    command = bubblewrapped(o.python, o.disk_mb, o.files)
    variables = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
    return [*command, "--as-pid-1", "--clearenv", *variables, "--chdir", "/tmp"]


def _limits(o: SandboxOptions) -> list[str]:
    """Return a command prefix that limits the program's resources."""
    limits = {
        "as": o.memory_mb << 20,
        "cpu": int(o.timeout_s) + 1,
        "fsize": o.disk_mb << 20,
        "nofile": 256,
        "core": 0,
        "memlock": 0,
        "msgqueue": 0,
    }
    if not o.unsafe:  # without its own namespace it would count all of the user's processes
        limits["nproc"] = o.processes
    return [util_linux("prlimit"), *(f"--{name}={value}:{value}" for name, value in limits.items()), "--"]
