"""The cut of a checkpoint, and what happens to work that was done after it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from winnow.record.ledger import Ledger, LedgerError
from winnow.types import Fate

from ..builders.ledgers import book_step, group, ledger, path, visit

__all__ = ["ledger", "path"]  # fixtures


def test_rollback_voids_what_came_after_and_reopens_what_was_in_flight(ledger: Ledger) -> None:
    for step in range(3):
        book_step(ledger, step, late=1)  # visits of step 2 are in flight: 4 and 5
    mark = json.loads(json.dumps(ledger.mark()))
    at_mark = ledger.digest()
    assert ledger.in_flight() == [4, 5]
    book_step(ledger, 3, late=1)
    ledger.evaluation(3, 8, 80, 0.1)
    assert ledger.in_flight() == [6, 7]
    ledger.set_meta("finished", "true")
    done = ledger.rollback(mark, reason="killed")
    assert done["restart"] == 1
    assert done["in_flight"] == [4, 5] == ledger.in_flight()
    assert done["voided"] == {"visits": 2, "outcomes": 2, "rollouts": 6, "steps": 1, "evaluations": 1}
    assert ledger.digest() == at_mark
    void = ledger.totals()["void"]
    assert (void["visits"], void["rollouts"], void["tokens"]) == (2, 6, 30)
    proof = ledger.verify()
    assert proof.ok, proof.problems
    assert (proof.restarts, proof.in_flight, proof.visits, proof.finished) == (1, 2, 6, False)


def test_resumed_run_has_the_digest_of_an_uninterrupted_one(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "straight.sqlite") as straight:
        for step in range(6):
            book_step(straight, step, late=1)
        want = straight.digest()
    for cut in range(1, 6):
        for lost in range(3):
            with Ledger.open(tmp_path / f"{cut}-{lost}.sqlite") as resumed:
                for step in range(cut):
                    book_step(resumed, step, late=1)
                mark = resumed.mark()
                for step in range(cut, cut + lost):
                    book_step(resumed, step, late=1)
            with Ledger.open(tmp_path / f"{cut}-{lost}.sqlite") as resumed:
                for _ in range(2):  # the second as if the restart itself had crashed
                    resumed.rollback(mark, reason="killed")
                for step in range(cut, 6):
                    book_step(resumed, step, late=1)
                assert resumed.digest() == want, (cut, lost)
                assert resumed.verify().ok


def test_digest_knows_everything_but_the_wall_clock(tmp_path: Path) -> None:
    def digest(name: str, seconds: float, **changes: float) -> str:
        with Ledger.open(tmp_path / name) as ledger:
            ledger.visit([visit(0)], step=0, version=0)
            done = group(0, [Fate.TRAINED], [changes.get("reward", 1.0)])
            done.rollouts[0].seconds = seconds
            ledger.finish(done, step=0)
            metrics = {"loss": changes.get("loss", 0.5), "seconds_total": seconds, "tokens_per_second": 1 / seconds}
            ledger.step(0, seconds={"generate": seconds}, metrics=metrics | {"step_time": seconds})
            ledger.evaluation(0, 1, int(changes.get("tokens", 10)), seconds)
            ledger.set_meta("run_id", name)
            return ledger.digest()

    base = digest("a", 0.1)
    assert digest("b", 0.2) == base
    others = [digest("c", 0.1, reward=0.5), digest("d", 0.1, loss=0.25), digest("e", 0.1, tokens=11)]
    assert len({base, *others}) == 4


def test_digest_does_not_depend_on_the_order_of_booking(tmp_path: Path) -> None:
    digests = set()
    for order in ([0, 1, 2], [2, 0, 1]):
        with Ledger.open(tmp_path / f"{order}.sqlite") as ledger:
            ledger.visit([visit(n) for n in order], step=0, version=0)
            for n in order:
                done = group(n, [Fate.TRAINED] * 3)
                done.rollouts.sort(key=lambda r: (r.sibling + n) % 3 if order[0] else r.sibling)
                ledger.finish(done, step=0)
            digests.add(ledger.digest())
    assert len(digests) == 1


def test_marks_are_of_what_counts_also_after_a_rollback(path: Path) -> None:
    with Ledger.open(path) as ledger:
        book_step(ledger, 0)
        first = ledger.mark()
        assert ledger.mark() == first, "nothing new was booked"
        book_step(ledger, 1)
        second = ledger.mark()
        assert second["visits"]["rows"] == 4
        book_step(ledger, 2)
        assert ledger.mark() != second
        ledger.rollback(second, reason="killed")
        assert ledger.mark() == second
        book_step(ledger, 2)
        third = ledger.mark()
    with Ledger.open(path) as ledger:
        assert ledger.mark() == third
        ledger.rollback(first, reason="the last two checkpoints are damaged")
        assert ledger.in_flight() == []
        with pytest.raises(LedgerError, match="visits has 2 of the 6 rows"):
            ledger.rollback(third, reason="of a history that is void")
        assert ledger.verify().ok


def test_rollback_refuses_a_ledger_that_is_not_the_checkpoints(path: Path, tmp_path: Path) -> None:
    with Ledger.open(path) as ledger:
        book_step(ledger, 0)
        mark = ledger.mark()
    other = tmp_path / "other.sqlite"
    with Ledger.open(other) as ledger:
        book_step(ledger, 0, visits=1)
        before = ledger.digest()
        with pytest.raises(LedgerError, match=r"rollouts has 3 of the 6 rows.*Resume from another checkpoint"):
            ledger.rollback(mark, reason="killed")
        proof = ledger.verify({"checkpoints/step-000001/state.json": mark})
        assert "state.json was saved with: visits has 1 of the 2 rows" in proof.problems[0]
        assert not proof.ok
        assert ledger.verify({"step 1": ledger.mark()}).ok
        with pytest.raises(LedgerError, match="not a mark of the ledger"):
            ledger.rollback({"rows": 3}, reason="killed")
        assert ledger.digest() == before


def test_new_ledger_does_not_pass_for_a_lost_one(path: Path) -> None:
    with Ledger.open(path) as ledger:
        book_step(ledger, 0)
        mark = ledger.mark()
    path.unlink()
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="visits has 0 of the 2 rows"):
        ledger.rollback(mark, reason="killed")


def test_kill_loses_nothing_that_was_booked(path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import tests.builders.ledgers as t\n"
        "ledger = t.Ledger.open(sys.argv[1])\n"
        "t.book_step(ledger, 0); print(__import__('json').dumps(ledger.mark()), flush=True)\n"
        "t.book_step(ledger, 1); ledger.visit([t.visit(4)], step=2, version=2); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(path), str(Path(__file__).parents[2])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Ledger.open(path, read_only=True) as ledger:
        assert (ledger.verify().ok, ledger.verify().visits, ledger.in_flight()) == (True, 5, [4])
    with Ledger.open(path) as ledger:
        assert ledger.rollback(json.loads(done.stdout), reason="killed")["voided"]["visits"] == 3
        assert ledger.verify().ok


def test_mark_alone_survives_without_the_write_ahead_log(path: Path, tmp_path: Path) -> None:
    with Ledger.open(path) as ledger:
        book_step(ledger, 0)
        mark = ledger.mark()
        book_step(ledger, 1)
        shutil.copy(path, tmp_path / "copy.sqlite")  # the main file only, as after a lost log
    with Ledger.open(tmp_path / "copy.sqlite") as copy:
        assert copy.rollback(mark, reason="the log is lost")["voided"]["visits"] == 0


def test_rollback_is_all_or_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    book_step(ledger, 0)
    mark = ledger.mark()
    book_step(ledger, 1)
    before = ledger.digest()

    def fail(name: str) -> None:
        raise OSError(28, f"no space left on device, at {name}")

    with monkeypatch.context() as patch:
        patch.setattr("winnow.record.ledger.failpoint", fail)
        with pytest.raises(OSError, match="no space left on device, at ledger"):
            ledger.rollback(mark, reason="killed")
    assert (ledger.digest(), ledger.verify().restarts) == (before, 0)
    assert ledger.rollback(mark, reason="killed")["voided"]["rollouts"] == 6
