"""The ledger: everything is booked exactly once, and a file that cannot be trusted is refused."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.methods.group_kind import GroupJudge
from winnow.methods.success import Success
from winnow.record.ledger import Ledger, LedgerError, _zero_variance
from winnow.types import Fate, Group, Rollout, Segment, Verdict

from ..builders.ledgers import (
    book_step,
    group,
    ledger,  # noqa: F401
    path,  # noqa: F401
    rollout,
    visit,
)

ALL_FATES = [fate for fate in Fate if fate != Fate.SKIPPED]


def row(path: Path, query: str) -> tuple[object, ...]:
    with sqlite3.connect(path) as db:
        return db.execute(query).fetchone()


def test_everything_about_a_group_is_kept(ledger: Ledger, path: Path) -> None:
    ledger.visit([visit(0)], step=3, version=2)
    done = group(0, [Fate.TRAINED, Fate.PRUNED, Fate.TRAINED], [0.0, None, 0.5])
    done.rollouts[0].rewards = {"format": 0.1, "correct": None, "broken": float("nan")}
    done.rollouts[0].stop_reason = "eos"
    done.rollouts[0].survival_p = 0.5
    done.rollouts[0].reason = "\ud800"
    done.rollouts[0].later_segments = [Segment(2, (1, 2)), Segment(3, (1, 2, 3, 4))]
    ledger.finish(done, step=4)
    ledger.close()
    assert row(path, "SELECT visit, step, version, epoch, prompt_id, ordinal FROM visits") == (0, 3, 2, 0, "p0", 0)
    query = "SELECT visit, step, fate, group_size, mean_reward, zero_variance FROM outcomes"
    assert row(path, query) == (0, 4, "trained", 3, 0.25, "none")
    query = (
        "SELECT visit, sibling, step, fate, reason, prompt_tokens, tokens, env_tokens, reward, rewards FROM rollouts"
    )
    rewards = '{"broken": null, "correct": null, "format": 0.1}'
    assert row(path, query) == (0, 0, 4, "trained", "\\ud800", 3 + 2 + 4, 5, 2, 0.0, rewards)
    query = "SELECT first_version, last_version, seconds, stop_reason, survival_p FROM rollouts"
    assert row(path, query) == (0, 1, 0.25, "eos", 0.5)


def test_rollout_without_a_sampled_token_has_no_version(ledger: Ledger, path: Path) -> None:
    ledger.visit([visit(0)], step=0, version=0)
    nothing = Rollout(0, (1,), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0), np.zeros(0, np.int32))
    nothing.fate = Fate.FAILED
    ledger.finish(Group(visit(0), [nothing]), step=0)
    ledger.close()
    assert row(path, "SELECT tokens, first_version, last_version FROM rollouts") == (0, None, None)


@pytest.mark.parametrize(
    ("rewards", "maximum", "kind"),
    [
        ([1.0, 1.0], 1.0, "easy"),
        ([1.0, 1.0 - 1e-9], 1.0, "easy"),
        ([0.0, 0.0], 1.0, "hard"),
        ([0.1, 0.1, 0.1], 1.0, "hard"),
        ([0.0, 0.1], 1.0, "none"),
        ([0.0, 2e-8], 1.0, "none"),
        ([1.1, 1.1], 1.1, "easy"),
        ([1.0, 1.0], 1.1, "hard"),
        ([1.0], 1.0, None),
        ([], 1.0, None),
    ],
)
def test_zero_variance_kind(rewards: list[float], maximum: float, kind: str | None) -> None:
    of = group(0, [Fate.FILTERED] * len(rewards), rewards)
    assert _zero_variance(GroupJudge(Success(at_least=maximum)).kind(of)) == kind


def test_what_counts_as_right_in_the_run_decides_easy(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.judge = GroupJudge(Success(at_least=2.5))
        ledger.visit([visit(0), visit(1)], step=0, version=0)
        ledger.finish(group(0, [Fate.FILTERED] * 2, [1.0, 1.0]), step=0)
        ledger.finish(group(1, [Fate.FILTERED] * 2, [2.5, 2.5]), step=0)
        assert ledger.get_meta("absent") is None
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT zero_variance FROM outcomes ORDER BY visit").fetchall() == [("hard",), ("easy",)]


def test_fate_of_a_visit_is_the_furthest_of_its_members(ledger: Ledger, path: Path) -> None:
    cases = [
        ([Fate.FAILED, Fate.TRAINED], "trained"),
        ([Fate.FILTERED, Fate.STALE], "stale"),
        ([Fate.PRUNED, Fate.SURPLUS, Fate.FAILED], "surplus"),
        ([Fate.FAILED, Fate.FILTERED, Fate.PRUNED], "filtered"),
        ([Fate.CUT, Fate.FAILED], "cut"),
        ([Fate.FAILED, Fate.PRUNED], "pruned"),
        ([Fate.FAILED, Fate.FAILED], "failed"),
    ]
    ledger.visit([visit(i) for i in range(len(cases))], step=0, version=0)
    for number, (fates, _) in enumerate(cases):
        ledger.finish(group(number, fates), step=0)
    ledger.close()
    with sqlite3.connect(path) as db:
        assert [f for (f,) in db.execute("SELECT fate FROM visit_fates ORDER BY visit")] == [want for _, want in cases]


def test_reason_is_that_of_the_members_that_decided(ledger: Ledger, path: Path) -> None:
    ledger.visit([visit(0), visit(1, Verdict(False, "solved twice", 0.25))], step=0, version=0)
    done = group(0, [Fate.FAILED, Fate.FILTERED])
    done.rollouts[0].reason, done.rollouts[1].reason = "timeout", "one survivor"
    ledger.finish(done, step=0)
    ledger.close()
    with sqlite3.connect(path) as db:
        found = db.execute("SELECT fate, reason FROM visit_fates ORDER BY visit").fetchall()
        assert found == [("filtered", "one survivor"), ("skipped", "solved twice")]
        assert db.execute("SELECT keep, probability FROM visits WHERE visit = 1").fetchone() == (0, 0.25)


@pytest.mark.parametrize("then", ["visit", "step", "wait", "read"])
def test_finished_groups_are_written_together(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """With whatever is written or read next, at the latest with the first that ends a second later."""
    monkeypatch.setattr("winnow.record.ledger.WAIT_S", 1e9)
    ledger.visit([visit(i) for i in range(5)], step=0, version=0)
    count = "SELECT (SELECT COUNT(*) FROM outcomes), (SELECT COUNT(*) FROM rollouts)"
    for number in range(3):
        ledger.finish(group(number, [Fate.TRAINED] * 20), step=0)
    assert row(path, count) == (0, 0)
    with pytest.raises(ValueError, match="visit 1: already finished; its fate is trained, since step 0"):
        ledger.finish(group(1, [Fate.TRAINED]), step=0)
    assert row(path, count) == (3, 60)
    ledger.finish(group(3, [Fate.TRAINED] * 20), step=0)
    if then == "visit":
        ledger.visit([visit(5)], step=0, version=0)
    elif then == "step":
        ledger.step(0, seconds={}, metrics={}, version=0)
    elif then == "wait":
        monkeypatch.setattr("winnow.record.ledger.WAIT_S", 0.0)
        ledger.finish(group(4, [Fate.TRAINED] * 20), step=0)
    else:
        ledger.totals()
    assert row(path, count) == ((5, 100) if then == "wait" else (4, 80))
    assert ledger.verify().ok


class Interrupted:
    """A connection whose next commit is followed by Ctrl-C."""

    def __init__(self, db: sqlite3.Connection, *, committed: bool) -> None:
        self.db, self.committed, self.armed = db, committed, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def execute(self, statement: str, *values: Any) -> Any:
        if statement == "COMMIT" and self.armed:
            self.armed = False
            if self.committed:
                self.db.execute(statement)
            raise KeyboardInterrupt
        return self.db.execute(statement, *values)


@pytest.mark.parametrize("committed", [True, False])
def test_an_interrupted_commit_books_once(ledger: Ledger, path: Path, *, committed: bool) -> None:
    ledger.visit([visit(0)], step=0, version=0)
    ledger.finish(group(0, [Fate.TRAINED]), step=0)
    ledger._db = Interrupted(ledger._db, committed=committed)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ledger.totals()
    ledger.close()
    with Ledger.open(path) as again:
        assert again.in_flight() == []
        assert again.verify().ok


def test_two_processes_that_book_one_group(ledger: Ledger, path: Path) -> None:
    ledger.visit([visit(0)], step=0, version=0)
    with Ledger.open(path) as other:
        for each in (ledger, other):
            each.finish(group(0, [Fate.TRAINED]), step=0)
        ledger.totals()
        with pytest.raises(LedgerError, match=r"another process has booked .*; let one run use a run directory"):
            other.totals()
        other._ended = {table: [] for table in other._ended}


def test_what_was_not_written_is_in_flight(ledger: Ledger, path: Path) -> None:
    """As after a process that was killed."""
    ledger.visit([visit(0), visit(1)], step=0, version=0)
    ledger.finish(group(0, [Fate.TRAINED]), step=0)
    with Ledger.open(path, read_only=True) as other:
        assert other.in_flight() == [0, 1]
    assert ledger.in_flight() == [1]


def test_in_flight_until_finished(ledger: Ledger) -> None:
    ledger.visit([visit(0), visit(1), visit(2, Verdict(False, "easy"))], step=0, version=0)
    assert ledger.in_flight() == [0, 1]
    ledger.finish(group(1, [Fate.TRAINED]), step=0)
    assert ledger.in_flight() == [0]
    assert ledger.totals()["in_flight"]["visits"] == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rollout(1, None), r"visit 0, sibling 1: .*needs a fate other than skipped, got None"),
        (rollout(1, Fate.SKIPPED), "needs a fate other than skipped"),
        (rollout(0), r"same sibling twice in \[0, 0\]"),
        (rollout(1, Fate.TRAINED, float("nan")), "reward nan is not finite"),
        (rollout(1, Fate.CUT, float("-inf")), "reward -inf is not finite"),
        (rollout(1, Fate.TRAINED, None), "trained without a reward"),
    ],
)
def test_bad_group_is_refused_whole(ledger: Ledger, bad: Rollout, message: str) -> None:
    ledger.visit([visit(0)], step=0, version=0)
    with pytest.raises(ValueError, match=message):
        ledger.finish(Group(visit(0), [rollout(0), bad]), step=0)
    assert ledger.in_flight() == [0]
    assert ledger.totals()["trained"]["rollouts"] == 0


@pytest.mark.parametrize("fate", [Fate.FAILED, Fate.PRUNED])
def test_what_failed_has_no_reward(ledger: Ledger, fate: Fate) -> None:
    ledger.visit([visit(0)], step=0, version=0)
    failed = rollout(0, fate)
    failed.reward = 0.0
    with pytest.raises(ValueError, match=rf"fate {fate} with reward 0.0; its reward must be None"):
        ledger.finish(Group(visit(0), [failed]), step=0)


def test_nothing_is_booked_twice(ledger: Ledger) -> None:
    ledger.visit([visit(0), visit(1, Verdict(False))], step=0, version=0)
    ledger.finish(group(0, [Fate.TRAINED]), step=0)
    ledger.step(0, seconds={}, metrics={})
    before = ledger.digest()
    with pytest.raises(ValueError, match=r"visit 0: already finished; its fate is trained, since step 0"):
        ledger.finish(group(0, [Fate.FILTERED]), step=1)
    with pytest.raises(ValueError, match="visit 1: already finished; its fate is skipped"):
        ledger.finish(group(1, [Fate.TRAINED]), step=1)
    with pytest.raises(ValueError, match="visit 7: never dispatched"):
        ledger.finish(group(7, [Fate.TRAINED]), step=1)
    with pytest.raises(ValueError, match="visit 8: a group without rollouts"):
        ledger.finish(Group(visit(8), []), step=1)
    with pytest.raises(ValueError, match=r"step 1: visit 0 booked before"):
        ledger.visit([visit(2), visit(0)], step=1, version=0)
    with pytest.raises(ValueError, match="step 0: already booked"):
        ledger.step(0, seconds={}, metrics={})
    with pytest.raises(ValueError, match="seconds must be finite"):
        ledger.step(1, seconds={"generate": -1.0}, metrics={})
    assert ledger.digest() == before
    assert ledger.in_flight() == []


def test_totals_equal_a_count_by_hand(ledger: Ledger) -> None:
    draw = random.Random(0)
    want = {fate: {"visits": 0, "rollouts": 0, "tokens": 0, "prompt_tokens": 0} for fate in Fate}
    for number in range(200):
        keep = draw.random() < 0.8
        ledger.visit([visit(number, Verdict(keep))], step=0, version=0)
        if not keep:
            want[Fate.SKIPPED]["visits"] += 1
            continue
        fates = draw.choices(ALL_FATES, k=draw.randrange(1, 5))
        ledger.finish(group(number, fates), step=0)
        order = ["trained", "stale", "surplus", "filtered", "cut", "pruned", "failed"]
        want[min(fates, key=order.index)]["visits"] += 1
        for fate in fates:
            for key, n in (("rollouts", 1), ("tokens", 5), ("prompt_tokens", 3)):
                want[fate][key] += n
    ledger.evaluation(0, 16, 160, 1.5)
    ledger.evaluation(5, rollouts=16, tokens=140, seconds=1.0)
    totals = ledger.totals()
    for fate in Fate:
        assert {k: totals[fate][k] for k in want[fate]} == want[fate]
        assert totals[fate]["seconds"] == 0.25 * want[fate]["rollouts"]
    assert totals["evaluation"] == {"visits": 0, "rollouts": 32, "prompt_tokens": 0, "tokens": 300, "seconds": 2.5}
    assert not any(totals["probe"].values())
    assert ledger.verify().ok


def test_probes_are_booked_apart_and_stay_booked_after_a_restart(ledger: Ledger) -> None:
    mark, digest = ledger.mark(), ledger.digest()
    for _ in range(2):
        ledger.probes(group(0, [Fate.TRAINED, Fate.FILTERED]).rollouts)
        ledger.rollback(mark, reason="resumed")
    assert ledger.totals()["probe"] == {"visits": 0, "rollouts": 4, "prompt_tokens": 0, "tokens": 20, "seconds": 1.0}
    assert sum(row["tokens"] for row in ledger.totals().values()) == 20
    assert ledger.digest() == digest
    assert ledger.verify({"a checkpoint": mark}).ok


def test_read_only_never_writes(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such ledger"):
        Ledger.open(path, read_only=True)
    with Ledger.open(path) as ledger:
        book_step(ledger, 0)
    before = path.read_bytes()
    with Ledger.open(path, read_only=True) as reader:
        assert reader.verify().ok
        with pytest.raises(LedgerError, match="cannot write"):
            reader.visit([visit(9)], step=9, version=9)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_reader_sees_a_run_that_is_going_on(path: Path) -> None:
    with Ledger.open(path) as writer:
        book_step(writer, 0)
        with Ledger.open(path, read_only=True) as reader:
            assert reader.verify().visits == 2
            book_step(writer, 1)
            writer.mark()
            assert reader.verify().visits == 4


def test_second_writer_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.record.ledger_file.BUSY_TIMEOUT_S", 0.05)
    with Ledger.open(path) as one, Ledger.open(path) as two:
        one._db.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match=r"cannot write: database is locked. Is another process"):
            two.visit([visit(0)], step=0, version=0)
        one._db.execute("ROLLBACK")
        two.visit([visit(0)], step=0, version=0)
        assert one.in_flight() == [0]


def test_files_that_are_no_ledger_are_refused(tmp_path: Path) -> None:
    def refused(name: str, message: str, *, read_only: bool = False) -> None:
        with pytest.raises(LedgerError, match=message):
            Ledger.open(tmp_path / name, read_only=read_only)

    (tmp_path / "text").write_text("hello " * 400)
    refused("text", "text: damaged or not an SQLite file")
    with sqlite3.connect(tmp_path / "other") as db:
        db.execute("CREATE TABLE t (x)")
    refused("other", "not a Winnow ledger")
    (tmp_path / "empty").touch()
    refused("empty", "is empty", read_only=True)
    Ledger.open(tmp_path / "empty").close()
    with sqlite3.connect(tmp_path / "empty") as db:
        db.execute("PRAGMA user_version = 99")
    refused("empty", r"newer Winnow \(ledger schema 99.*Upgrade")
    with sqlite3.connect(tmp_path / "empty") as db:
        db.execute("PRAGMA user_version = 1")
    refused("empty", r"earlier Winnow \(ledger schema 1.*new run directory")
    (tmp_path / "folder").mkdir()
    refused("folder", "cannot open")
    with pytest.raises(FileNotFoundError, match="the folder does not exist"):
        Ledger.open(tmp_path / "absent" / "ledger.sqlite")


def test_damaged_pages_are_refused(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for step in range(30):
            book_step(ledger, step, visits=8)
    whole = path.read_bytes()
    for start, stop in ((len(whole) // 2, len(whole)), (8192, 16384)):
        path.write_bytes(whole[:start] + (b"" if stop == len(whole) else bytes(stop - start)) + whole[stop:])
        with pytest.raises(LedgerError, match="damaged"):
            Ledger.open(path)
