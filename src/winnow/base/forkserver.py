"""Processes forked off a server that has done their imports once: they start immediately and share its memory.

A sampler's imports take seconds of CPU time and 400 MB. This module imports nothing heavy, because the server loads it
before everything else.

Why not `multiprocessing`'s forkserver with a preload (tried with Python 3.11):
- Each child imports the user's script again; one without `if __name__ == "__main__"` fails.
- `Process.start()` waits until the server has imported everything, with no deadline.
- Children outlive a killed parent, and what a child has started outlives the child.
- A process has one server, with the environment of its first use and whatever other libraries preload.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from .machine import lasting_imports, quiet_imports

SERVE = (
    "import sys; from winnow.base.forkserver import die_with; die_with(int(sys.argv[1])); "
    "from winnow.base.forkserver import serve; serve(*sys.argv[2:])"
)
"""Server command. It and its forks exit with its parent from the first moment: imports may take long."""
KILLED = -int(signal.SIGKILL)


class Forked:
    """A forked process: its pipes and exit status. It is killed, at the latest, with its server."""

    def __init__(self, server: ForkServer, stdin: int, stdout: int, stderr: int, status: int) -> None:
        self._server = server
        """A server without references exits and frees its 300 MB."""
        self.stdin, self.stdout, self.stderr = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), os.fdopen(stderr, "rb")
        self._status = os.fdopen(status, "rb")
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._ended: int | None = None

    @property
    def pid(self) -> int:
        """Return the process id once the process has started; 0 if it could not."""
        with self._lock:
            if self._pid is None:
                self._pid = int(self._status.readline() or 0)
        return self._pid

    def poll(self) -> int | None:
        """Return the exit status or None, as `subprocess.Popen.poll`."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, or the negative signal number, as `subprocess.Popen.wait`."""
        begun = self.pid
        with self._lock:
            if self._ended is None:
                if begun and timeout is not None and not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(begun), timeout)
                self._ended = int((begun and self._status.readline()) or KILLED)
            return self._ended

    def kill(self) -> None:
        """Kill the process with everything it started."""
        if self._pid is None and self._server.importing:
            self._server.kill()
        if self.poll() is None:
            for end in (os.killpg, os.kill):  # it may have no group yet
                with contextlib.suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)


class ForkServer:
    """A process with the imports of `target` ("module:function"); its children run that function."""

    def __init__(self, target: str, env: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(os.getpid()), target, str(fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # library notes; children report a failed import
                env=env,
                pass_fds=[fd],
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._socket, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def importing(self) -> bool:
        """Return whether the server is still importing, so no requested child can have started."""
        return self.alive and not select.select([self._socket], [], [], 0)[0]

    def kill(self) -> None:
        """Kill the server with its children."""
        self._process.kill()
        self._process.wait()

    def fork(self) -> Forked:
        """Return a process in its own session, without waiting for its start."""
        (in_r, in_w), (out_r, out_w), (err_r, err_w), (status_r, status_w) = (os.pipe() for _ in range(4))
        theirs = [in_r, out_w, err_w, status_w]
        try:
            with contextlib.suppress(OSError):  # the server has exited, which closes the pipes
                socket.send_fds(self._socket, [b"f"], theirs)
        finally:
            for fd in theirs:
                os.close(fd)
        return Forked(self, in_w, out_r, err_r, status_r)


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()


class _Servers(threading.local):
    """Servers of this thread: the kernel kills them, and thereby their children, when the thread ends."""

    def __init__(self) -> None:
        self.known: weakref.WeakValueDictionary[tuple[object, ...], ForkServer] = weakref.WeakValueDictionary()


_servers = _Servers()


def forkserver(target: str, env: dict[str, str]) -> ForkServer:
    """Return the server for this environment and working directory; it exits when unreferenced."""
    key = target, os.getcwd(), os.getpid(), frozenset(env.items())
    found = _servers.known.get(key)
    if found is None or not found.alive:
        found = _servers.known[key] = ForkServer(target, env)
    return found


def serve(target: str, fd: str) -> None:
    """Run the server's side; in a child, return when `target` is done."""
    begin = _imported(target)
    with socket.socket(fileno=int(fd)) as connection:
        connection.send(b"i")  # unread by the parent: means imported
        child = _listen(connection)
    if child:
        begin()


def _imported(target: str) -> Callable[[], None]:
    """Return the target, or a function that exits every child with the import error."""
    module, name = target.split(":")
    quiet_imports()
    try:
        with lasting_imports():
            found: Callable[[], None] = getattr(importlib.import_module(module), name)
        return found
    except BaseException:
        said = traceback.format_exc()

        def fail() -> None:
            sys.exit(said)

        return fail


def _listen(connection: socket.socket) -> bool:
    """Fork on every request and report exits. Return True in a child, False when the client has closed."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    told: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([woken, connection.fileno()], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(told)
        if connection.fileno() in ready:
            try:
                _, fds, *_ = socket.recv_fds(connection, 1, 4)
            except ConnectionResetError:
                return False
            if not fds:
                return False
            if _fork(fds, told):
                signal.set_wakeup_fd(-1)
                for end in (woken, wake):
                    os.close(end)
                return True


def _reap(told: dict[int, int]) -> None:
    while told and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        pid = ended.si_pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # its children, before the pid can be reused
        _, status = os.waitpid(pid, 0)
        _tell(told[pid], os.waitstatus_to_exitcode(status))
        os.close(told.pop(pid))


def _tell(fd: int, what: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # the client has closed
        os.write(fd, f"{what}\n".encode())


def _fork(fds: list[int], told: dict[int, int]) -> bool:
    """Fork one process; return True in the child."""
    server = os.getpid()
    *streams, status = fds
    try:
        pid = os.fork()
    except OSError as error:  # out of memory or processes
        _tell(streams[2], f"cannot start a process: {error}")
        for fd in fds:
            os.close(fd)
        return False
    if pid:
        for fd in streams:
            os.close(fd)
        told[pid] = status
        _tell(status, pid)
        return False
    os.setsid()
    die_with(server)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for i, fd in enumerate(streams):
        os.dup2(fd, i)
    for fd in (*fds, *told.values()):
        os.close(fd)
    _reseed()
    return True


def _reseed() -> None:
    """Reseed numpy and torch, or every child would draw the same numbers; `random` reseeds itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when the parent's thread ends, even while a C call holds the interpreter."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def call_itself(name: str) -> None:
    """Set the name shown by Linux's `top` and `ps -o comm`, up to 15 characters."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode())


def lines_with_parent(gone: Callable[[], object]) -> tuple[queue.SimpleQueue[Any], Callable[[str], None]]:
    """Return a queue of the parent's messages, one JSON line each, and a function that writes a line to it.

    Afterwards prints go to stderr, and stdin is empty. `gone` is called when the parent's messages end.
    """
    requests, replies, own = os.fdopen(os.dup(0), "rb"), os.dup(1), os.getpid()
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in requests:
                inbox.put(json.loads(line))
        finally:
            gone()

    def write(text: str) -> None:
        if os.getpid() != own:
            os._exit(0)  # child of a function that forked and continued to here
        data = memoryview(text.encode() + b"\n")
        while data:
            data = data[os.write(replies, data) :]

    threading.Thread(target=read, daemon=True).start()
    return inbox, write
