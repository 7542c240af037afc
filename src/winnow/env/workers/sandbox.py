"""Runs Python that a model wrote in bubblewrap: no network, no files but /usr, no privileges, bounded resources.

Within what `bubblewrap` contains come resource limits. The wall clock and the amount of output are watched from
outside, and everything inside dies with its first process. What is not bounded is the sum over a program's processes:
up to `processes` of them may use `memory_mb` each.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from .bubblewrap import SandboxError, advice, bubblewrapped, found, slot_user
from .seccomp import program

MAX_OUTPUT_BYTES = 1_000_000
"""Largest value of an option; beyond it the system's calls for times and limits overflow."""
GRACE_S = 5.0
"""Beyond its time, for starting and ending a sandbox."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program. Nothing of it is a verdict: the program says what it wants, its exit status included."""

    stdout: str
    stderr: str
    exit_code: int | None
    """128 + n for a program that ended by signal n; None when it was stopped from outside."""
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
    """Megabytes of files in /tmp, which live in memory."""
    files: int = 1_024
    """Files and directories in /tmp; each costs the kernel about a kilobyte."""
    max_output: int = 65_536
    """Bytes of stdout and of stderr."""
    slots: int = 2
    """Programs that run at once; others wait."""
    python: str = "/usr/bin/python3"
    """Interpreter inside. One outside /usr is shown with its installation, read-only."""
    unsafe: bool = False
    """Run without a sandbox, with resource limits only. For machines that are one themselves."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mb", "processes", "disk_mb", "files", "max_output", "slots"):
            if not 0 < getattr(self, name) <= MAX_OUTPUT_BYTES:
                raise ValueError(f"sandbox: {name} must lie in (0, {MAX_OUTPUT_BYTES:,}], not {getattr(self, name)}")
        if self.unsafe and self.python != SandboxOptions.python:
            raise ValueError("sandbox: unsafe programs run in Winnow's own interpreter; remove python, or unsafe")


class Sandbox:
    """Thread-safe. Raises SandboxError at once when programs cannot be contained on this machine."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self._command = [] if self.options.unsafe else _contained(self.options)
        self._limits = _limits(self.options)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.options.slots):
            self._slots.put(slot)
        self._threads = ThreadPoolExecutor(self.options.slots, thread_name_prefix="winnow-sandbox")
        self._running: set[_Run] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._probe()

    def start(self, code: str) -> Future[Outcome]:
        """Run a program; the future ends by a deadline, with SandboxError if the sandbox did not start."""
        return self._threads.submit(self.run, code)

    def run(self, code: str) -> Outcome:
        slot = self._slots.get()
        try:
            with self._registered(_Run(self, slot, code)) as run:
                return run.outcome()
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        """Kill what runs. Safe to call twice."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for run in running:
            run.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    @contextlib.contextmanager
    def _registered(self, run: _Run) -> Iterator[_Run]:
        try:
            with self._lock:
                if self._closed:
                    raise SandboxError("the sandbox was closed")
                run.spawn()
                self._running.add(run)
            yield run
        finally:
            run.end()
            with self._lock:
                self._running.discard(run)

    def _probe(self) -> None:
        """A first program must come through, and must not see this machine's files."""
        outcome = self.run("import os\nprint(6 * 7, os.path.exists('/etc'), os.getpid())")
        expected = None if self.options.unsafe else "42 False 1\n"
        if outcome.exit_code != 0 or (expected and outcome.stdout != expected):
            said = outcome.stderr.strip() or outcome.stdout.strip() or f"exit status {outcome.exit_code}"
            raise SandboxError(
                f"sandbox: a first program did not come through: {said[-300:]}. Is {self.options.python} there, and "
                "readable for everybody?"
            )


class _Run:
    """One program, from its start to the end of all its processes."""

    def __init__(self, sandbox: Sandbox, slot: int, code: str) -> None:
        self._sandbox, self._options, self._slot = sandbox, sandbox.options, slot
        self._code = code.encode("utf-8", "surrogatepass")
        self._process: subprocess.Popen[bytes] | None = None
        self._files: list[IO[bytes]] = []
        self._killed = False

    def spawn(self) -> None:
        code, filter_, status = (self._file() for _ in range(3))
        code.write(self._code)
        filter_.write(b"" if self._options.unsafe else program())
        for file in (code, filter_):
            file.seek(0)
        uid = None if self._options.unsafe else slot_user(self._slot)
        passed: tuple[int, ...] = ()
        if self._options.unsafe:
            command = [*self._sandbox._limits, sys.executable, "-I", "-"]
        else:
            files = ["--perms", "0444", "--file", str(code.fileno()), "/tmp/main.py"]
            files += ["--seccomp", str(filter_.fileno()), "--json-status-fd", str(status.fileno())]
            inside = [*self._sandbox._limits, self._options.python, "-I", "/tmp/main.py"]
            command = [*self._sandbox._command, *files, "--remount-ro", "/", "--", *inside]
            passed = (code.fileno(), filter_.fileno(), status.fileno())
        self._process = subprocess.Popen(
            command,
            stdin=code if self._options.unsafe else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=passed,
            env={"PATH": "/usr/bin:/bin"},
            cwd="/",
            start_new_session=True,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else (),
        )
        self._status_file = status

    def _file(self) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._files.append(file)
        return file

    def outcome(self) -> Outcome:
        """Raises SandboxError when the program was never begun."""
        process, o = self._process, self._options
        assert process is not None
        outputs, reason = self._collect(process, time.monotonic() + o.timeout_s)
        if reason:
            self.kill()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SandboxError("sandbox: a program closed its output and could not be ended in time") from None
        stdout, stderr = (data[: o.max_output].decode("utf-8", "replace") for data in outputs)
        if reason:
            return Outcome(stdout, stderr, None, reason == "time", reason == "output")
        if self._killed:  # by `Sandbox.close`; bubblewrap may still have told how its child ended
            raise SandboxError("the sandbox was closed")
        if o.unsafe:
            code = process.returncode
            return Outcome(stdout, stderr, code if code >= 0 else 128 - code)
        exit_code = self._told("exit-code")
        if exit_code is None:
            why = stderr.strip()[-300:] or "it was killed"
            raise SandboxError(f"sandbox: could not be started: {why}{advice(why)}")
        return Outcome(stdout, stderr, exit_code)

    def _collect(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[list[bytes], str]:
        """stdout and stderr until both are closed; why it stopped before, or nothing."""
        found = {process.stdout: b"", process.stderr: b""}
        with selectors.DefaultSelector() as selector:
            for pipe in found:
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    return list(found.values()), "time"
                for ready, _ in selector.select(left):
                    pipe = ready.fileobj  # type: ignore[assignment]
                    assert pipe is not None
                    data = os.read(pipe.fileno(), 65_536)
                    found[pipe] += data
                    if not data:
                        selector.unregister(pipe)
                    if len(found[pipe]) > self._options.max_output:
                        return list(found.values()), "output"
        return list(found.values()), "" if self._ends(process, deadline) else "time"

    @staticmethod
    def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
        """A program may close its output and go on."""
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _told(self, key: str) -> int | None:
        """Reports of bubblewrap: `child-pid` once there is one, `exit-code` at the end."""
        text = os.pread(self._status_file.fileno(), 65_536, 0).decode("utf-8", "replace")
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                if key in (said := json.loads(line)):
                    return int(said[key])
        return None

    def kill(self) -> None:
        """The first process inside, with which all others end, and bubblewrap itself."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if (child := self._told("child-pid")) is not None:
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        if self._process is not None:
            self._process.wait()
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
        for file in self._files:
            file.close()


def _contained(o: SandboxOptions) -> list[str]:
    command = bubblewrapped(o.python, o.disk_mb, o.files)
    return [*command, "--as-pid-1", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/tmp"]


def _limits(o: SandboxOptions) -> list[str]:
    """A command before the program that gives up its right to more."""
    limits = {
        "as": o.memory_mb << 20,
        "cpu": int(o.timeout_s) + 1,
        "fsize": o.disk_mb << 20,
        "nofile": 256,
        "core": 0,
        "memlock": 0,
        "msgqueue": 0,
    }
    if not o.unsafe:  # outside a namespace of its own it would count all of the user's processes
        limits["nproc"] = o.processes
    return [found("prlimit"), *(f"--{name}={value}:{value}" for name, value in limits.items()), "--"]
