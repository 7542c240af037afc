"""A child process: lines under a deadline, output with a bound, last words, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from winnow.base.child import Child, GroupProcess

ECHO = """
import os, subprocess, sys
for line in sys.stdin:
    if line == "start\\n":
        print(subprocess.Popen(["sleep", "100"], start_new_session=False).pid, flush=True)
    elif line == "fail\\n":
        sys.stderr.write("x" * 100_000 + " why it failed")
        os._exit(3)
    else:
        print(line * 2, end="", flush=True)
"""


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(GroupProcess([sys.executable, "-c", ECHO]))
    yield child
    child.end()


def soon() -> float:
    return time.monotonic() + 60


def test_lines_come_one_by_one(child: Child) -> None:
    long = b"a" * 1_000_000 + b"\n"
    child.send(b"one\n", soon())
    assert [child.line(soon()), child.line(soon())] == [b"one", b"one"]
    child.send(long, soon())
    with pytest.raises(ValueError, match="over 1000 bytes"):
        child.line(soon(), 1000)
    assert [child.line(soon()) + b"\n", child.line(soon()) + b"\n"] == [long, long]
    with pytest.raises(TimeoutError):
        child.line(time.monotonic() + 0.05)


def test_how_it_ended_with_its_last_words(child: Child) -> None:
    child.send(b"fail\n", soon())
    with pytest.raises(EOFError):
        child.line(soon())
    ending = child.ending()
    assert ending.startswith("exit status 3; its last words: xxx")
    assert ending.endswith("why it failed")
    assert len(ending) < 2_100
    with pytest.raises(EOFError):
        child.send(b"x" * 1_000_000, soon())


def test_what_it_started_ends_with_it(child: Child) -> None:
    child.send(b"start\n", soon())
    started = psutil.Process(int(child.line(soon())))
    child.end()
    child.end()
    until = soon()
    while started.is_running() and started.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert child.exited


def test_a_child_that_does_not_read_is_not_waited_for() -> None:
    child = Child(GroupProcess([sys.executable, "-c", "import time; time.sleep(60)"]))
    with pytest.raises(TimeoutError):
        child.send(b"x" * 1_000_000, time.monotonic() + 0.1)
    child.kill()
    assert child.ending() == "signal SIGKILL"
    child.end()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('x' * 1000)", ValueError),
        ("import sys; sys.stderr.write('x' * 1000)", ValueError),
        ("import time; time.sleep(60)", TimeoutError),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", TimeoutError),
    ],
)
def test_output_has_a_bound_and_a_deadline(code: str, error: type[Exception]) -> None:
    child = Child(GroupProcess([sys.executable, "-c", code], stdin=subprocess.DEVNULL))
    late = error is TimeoutError
    with pytest.raises(error):
        child.finish(time.monotonic() + (0.5 if late else 60), 999)
    child.end()


def test_all_output_and_the_status() -> None:
    code = "import sys; print('out'); sys.stderr.write('err'); sys.exit(7)"
    child = Child(GroupProcess([sys.executable, "-c", code], stdin=subprocess.DEVNULL))
    assert (child.finish(soon(), 999), child.stdout, child.stderr) == (7, b"out\n", b"err")
    child.end()
