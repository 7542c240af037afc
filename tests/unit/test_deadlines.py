"""Calls under a deadline: a loop that one call blocks does not stop those of others."""

from __future__ import annotations

import threading
import time

import pytest

from winnow.env.workers import calls


def test_a_loop_that_was_blocked_once_is_forgiven(monkeypatch) -> None:
    """Each late call counted as a loop of its own, and took the new loop away, until every call was refused."""
    monkeypatch.setattr(calls, "GRACE_S", 0.1)
    before = set(threading.enumerate())
    deadlines = calls.Deadlines(0.2)

    async def blocks() -> None:
        time.sleep(2.5)

    async def quick() -> str:
        return "done"

    deadlines.submit_async(blocks)
    late = []
    for _ in range(calls.MAX_ABANDONED + 2):  # they wait on the same loop, with deadlines of their own
        late.append(deadlines.submit_async(quick))
        time.sleep(0.06)
    assert any(isinstance(future.exception(timeout=20), TimeoutError) for future in late)
    for _ in range(3):
        assert deadlines.submit_async(quick).result(timeout=20) == "done"
        time.sleep(0.1)
    deadline = time.monotonic() + 20
    while sum(thread.name == "winnow-loop" for thread in set(threading.enumerate()) - before) > 1:
        assert time.monotonic() < deadline, "the blocked loop's thread has not ended"
        time.sleep(0.05)
    assert not deadlines._blocked_loops
    deadlines.close()


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_ends_no_deadlines(monkeypatch) -> None:
    monkeypatch.setattr(calls, "OVERLAP_S", 0.2)
    deadlines = calls.Deadlines(1.0, overlapping=True)
    assert deadlines.submit(lambda: time.sleep(0.5)).result(timeout=20) is None
    with pytest.raises(TimeoutError, match="took over 1 s"):
        deadlines.submit(lambda: time.sleep(8)).result(timeout=5)
    deadlines.close()
