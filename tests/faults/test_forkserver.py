"""Forked processes: how they end, with whom, and what they have of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from winnow.base.forkserver import Forked, ForkServer, forkserver

from . import forked

TARGET = f"{forked.__name__}:main"
PATHS = os.pathsep.join([str(Path(forked.__file__).parents[2]), *sys.path])
ENV = os.environ | {"PYTHONPATH": PATHS}


def ask(child: Forked, order: str) -> list[str]:
    child.stdin.write(order.encode() + b"\n")
    child.stdin.flush()
    return child.stdout.readline().decode().strip().split(" ", 2)


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def server() -> ForkServer:
    return forkserver(TARGET, ENV)


def test_how_a_child_ends_is_told(server: ForkServer) -> None:
    ends = {"exit 0": 0, "exit 3": 3, "fail": 1}
    children = {order: server.fork() for order in ends}
    for order, child in children.items():
        assert child.poll() is None
        ask(child, order)
        assert child.wait() == child.poll() == ends[order]
    assert b"ValueError: on order" in children["fail"].stderr.read()
    closed = server.fork()
    closed.stdin.close()
    assert closed.wait() == 0
    ended = server.fork()
    os.kill(ended.pid, signal.SIGTERM)
    assert ended.wait() == -signal.SIGTERM


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_a_child_has_started_ends_with_it(server: ForkServer, how: str) -> None:
    child = server.fork()
    (started,) = ask(child, "start")
    if how == "killed":
        child.kill()
        assert child.wait() == -signal.SIGKILL
        child.kill()  # once more does nothing
    else:
        ask(child, "exit 0")
        assert child.wait() == 0
    assert gone(int(started))


def test_children_have_random_numbers_a_group_and_an_environment_of_their_own(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [number for child in (server.fork(), server.fork()) for number in ask(child, "draw")]
    assert len(set(drawn)) == 4
    monkeypatch.chdir(tmp_path)
    other = forkserver(TARGET, ENV | {"COLOUR": "red"})
    assert other is not server
    assert ask(other.fork(), "environment") == ["red", "True", str(tmp_path)]
    assert forkserver(TARGET, ENV | {"COLOUR": "red"}) is other


def test_one_that_has_not_begun_is_killed_at_once(tmp_path: Path) -> None:
    """While the server imports what takes an hour."""
    (tmp_path / "hour.py").write_text("import time\ntime.sleep(3600)\n")
    child = forkserver("hour:main", ENV | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PATHS}"}).fork()
    started = time.monotonic()
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert child.stdout.read() == b""
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("target", ["tests.faults.nowhere:main", f"{forked.__name__}:nowhere"])
def test_what_cannot_be_imported_is_said_by_the_child(target: str) -> None:
    child = forkserver(target, ENV).fork()
    assert child.wait() == 1
    assert "nowhere'" in child.stderr.read().decode()


def test_a_machine_without_room_for_a_process() -> None:
    crowded = forkserver(f"{forked.__name__}:crowded", ENV | {"CROWDED": "1"})
    for _ in range(2):  # the server goes on
        child = crowded.fork()
        assert child.wait() == -signal.SIGKILL
        assert b"cannot start a process: [Errno 11] no room" in child.stderr.read()
    assert crowded.alive


def test_a_killed_server_takes_its_children_along_and_is_replaced(server: ForkServer) -> None:
    child = server.fork()
    pid = child.pid
    server.kill()
    assert child.wait() == -signal.SIGKILL
    assert gone(pid)
    late = server.fork()
    assert late.wait() == -signal.SIGKILL, "nobody waits for a server that has ended"
    assert late.stdout.read() == b""
    again = forkserver(TARGET, ENV)
    assert again is not server
    assert ask(again.fork(), "environment")[1] == "True"


def test_a_server_nobody_keeps_ends() -> None:
    before = {p.pid for p in psutil.Process().children()}
    server = ForkServer(TARGET, ENV)
    mine = {p.pid for p in psutil.Process().children()} - before
    assert len(mine) == 1
    child = server.fork()
    child.stdin.close()
    del server
    assert child.wait() == 0, "a child keeps it"
    del child
    assert not psutil.pid_exists(*mine), "until nobody keeps that"


def test_threads_have_servers_of_their_own(server: ForkServer) -> None:
    """The kernel ends a server with the thread that started it."""
    found: list[ForkServer] = []
    thread = threading.Thread(target=lambda: found.append(forkserver(TARGET, ENV)))
    thread.start()
    thread.join()
    assert found[0] is not server
    assert ask(server.fork(), "environment")[1] == "True"


def test_a_killed_parent_leaves_nobody() -> None:
    script = (
        "import os, sys, time; from winnow.base.forkserver import forkserver; "
        f"child = forkserver({TARGET!r}, dict(os.environ)).fork(); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env=ENV, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    server = psutil.Process(pid).ppid()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)
    assert gone(server)
