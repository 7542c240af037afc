"""Verification finds every way in which an account can be wrong, and nothing in one that is right."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from winnow.record.ledger import Ledger
from winnow.record.proof import Proof, render, verdict, verify
from winnow.types import Fate, Group, Prompt, Rollout, Verdict, Visit


def visit(number: int, *, keep: bool = True) -> Visit:
    return Visit(number, 0, Prompt(f"p{number}", number, "text"), Verdict(keep))


def group(number: int, fate: Fate, version: int) -> Group:
    versions = np.full(5, version, np.int32)
    rollouts = [
        Rollout(i, (1,), np.arange(5), np.ones(5, bool), np.zeros(5, np.float32), versions, fate=fate) for i in range(2)
    ]
    for r in rollouts:
        r.reward = None if fate in (Fate.FAILED, Fate.PRUNED) else float(r.sibling)
    return Group(visit(number), rollouts)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A finished run of three steps with max_lag 1: each has a trained, a filtered, a failed and a skipped visit."""
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        ledger.set_meta("max_lag", "1")
        for step in range(3):
            numbers = range(4 * step, 4 * step + 4)
            ledger.visit([visit(n, keep=n % 4 < 3) for n in numbers], step=step, version=step)
            for number, fate in zip(numbers, (Fate.TRAINED, Fate.FILTERED, Fate.FAILED), strict=False):
                ledger.finish(group(number, fate, max(0, step - 1)), step=step)
            ledger.step(step, seconds={}, metrics={}, version=step)
        ledger.set_meta("finished", "true")
    return path


def account(path: Path) -> Proof:
    """What the rows say, whatever their checksums do: as if a wrong Winnow had written them."""
    with sqlite3.connect(path) as db:
        return verify(db)


def problems(path: Path, *damage: str) -> list[str]:
    """The problems found of a ledger that lost its unique indices and was then tampered with."""
    with sqlite3.connect(path) as db:
        for index in ("one_visit", "one_outcome", "one_rollout", "one_step"):
            db.execute(f"DROP INDEX {index}")
        for statement in damage:
            db.execute(statement)
    proof = account(path)
    assert proof.ok == (not proof.problems)
    return proof.problems


def copy(table: str, where: str) -> str:
    columns = {
        "visits": "visit, step, version, epoch, prompt_id, ordinal, keep, reason, probability, time, checksum",
        "outcomes": "visit, step, fate, reason, group_size, time, checksum",
        "rollouts": "visit, sibling, step, fate, reason, prompt_tokens, tokens, env_tokens, reward, rewards,"
        " first_version, last_version, seconds, stop_reason, survival_p, checksum",
    }[table]
    return f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table} WHERE {where} LIMIT 1"


def test_right_account_has_no_problem(path: Path) -> None:
    assert problems(path) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (copy("visits", "visit = 5"), "visit 5 is booked 2 times"),
        ("DELETE FROM visits WHERE visit = 5", "visits 5 to 5 are missing"),
        ("DELETE FROM visits WHERE visit IN (0, 1)", "visits 0 to 1 are missing"),
        ("DELETE FROM visits WHERE visit = 5", "visit 5 is filtered but was never dispatched"),
        (copy("outcomes", "visit = 4"), "visit 4 has several fates: trained and trained"),
        ("DELETE FROM outcomes WHERE visit = 4", "visit 4 is still in flight in a finished run"),
        ("DELETE FROM outcomes WHERE visit = 4", "visit 4, sibling 0 is trained but its visit is not finished"),
        ("UPDATE outcomes SET fate = 'skipped' WHERE visit = 4", "visit 4 is skipped, against the verdict"),
        ("UPDATE outcomes SET fate = 'failed' WHERE visit = 3", "visit 3 is failed, against the verdict"),
        ("DELETE FROM rollouts WHERE visit = 4 AND sibling = 1", "visit 4 has a group of 2 but 1 rollouts"),
        (copy("rollouts", "visit = 4"), "visit 4, sibling 0 is booked 2 times, 2 times as trained"),
        ("UPDATE outcomes SET fate = 'cut' WHERE visit = 4", "visit 4 is cut but its rollouts are trained"),
        ("UPDATE rollouts SET fate = 'lost' WHERE visit = 4", "visit 4 is trained but its rollouts are lost"),
        (
            "UPDATE rollouts SET fate = 'lost' WHERE visit = 4 AND sibling = 0",
            "visit 4 is trained but its rollouts are",
        ),
        ("UPDATE rollouts SET reward = 0 WHERE visit = 2", "visit 2, sibling 0 is failed yet has a reward, 0.0"),
        ("UPDATE rollouts SET reward = NULL WHERE visit = 4", "visit 4, sibling 0 was trained without a reward"),
        ("UPDATE rollouts SET reward = 9e999 WHERE visit = 4", "visit 4, sibling 0 has a reward that is not finite"),
        ("UPDATE rollouts SET reward = 'x' WHERE visit = 4", "visit 4, sibling 0 has a reward that is not finite: x"),
        ("UPDATE rollouts SET tokens = -1 WHERE visit = 4", "visit 4, sibling 0 has a negative count: 1 prompt, -1"),
        ("UPDATE rollouts SET seconds = -1 WHERE visit = 4", "visit 4, sibling 0 has a negative count"),
        ("DELETE FROM steps WHERE step = 1", "visit 4, sibling 0 was trained in step 1, which is not booked"),
        ("DELETE FROM steps WHERE step = 2", "visit 8, sibling 0 was trained in step 2, which is not booked"),
        ("UPDATE rollouts SET step = 2 WHERE visit = 4", "visit 4, sibling 0 ended in step 2, its group in step 1"),
        (
            "UPDATE rollouts SET first_version = 0 WHERE visit = 8",
            "visit 8, sibling 0 was trained in step 2 at version 2 with a token of version 0: over max_lag 1",
        ),
        (
            "UPDATE visits SET void = 1 WHERE visit = 11",
            "1 rows of visits were voided by restart 1, which",
        ),
        ("UPDATE meta SET value = 'x' WHERE key = 'max_lag'", "max_lag in the meta table is not a whole number: 'x'"),
        ("INSERT INTO restarts VALUES (1, '', '{\"visits\": 2}', 0, 0)", "restart 1 voided 2 rows of visits, found 0"),
    ],
)
def test_every_kind_of_damage_is_found(path: Path, damage: str, problem: str) -> None:
    assert [found for found in problems(path, damage) if found.startswith(problem)]


def test_lag_without_versions_of_the_steps_uses_those_of_the_visits(path: Path) -> None:
    damage = "UPDATE rollouts SET first_version = 0 WHERE visit = 8"
    found = problems(path, "UPDATE steps SET version = NULL", damage)
    assert found == [
        f"visit 8, sibling {i} was trained in step 2 at version 2 with a token of version 0: over max_lag 1"
        for i in range(2)
    ]


def test_run_that_goes_on_may_have_work_in_flight(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.set_meta("finished", "false")
        ledger.visit([visit(12), visit(13)], step=3, version=3)
        ledger.finish(group(12, Fate.TRAINED, 3), step=3)
        going_on = ledger.verify()
        assert going_on.ok, going_on.problems
        assert (going_on.in_flight, going_on.finished) == (1, False)
        ledger.set_meta("finished", "true")
        found = ledger.verify().problems
    assert "visit 13 is still in flight in a finished run" in found
    assert "visit 12, sibling 0 was trained in step 3, which is not booked" in found


def test_many_problems_are_counted_not_listed(path: Path) -> None:
    found = problems(path, "UPDATE rollouts SET tokens = -1")
    assert len(found) == 6
    assert found[-1] == "... and 13 more like it"


def test_render_and_json_say_the_same(path: Path) -> None:
    with Ledger.open(path, read_only=True) as ledger:
        proof = ledger.verify()
    console = Console(width=100, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(render(proof))
    text = captured.get()
    assert "OK: exactly-once accounting holds (12 visits, 18 rollouts, 3 steps, 0 restarts; finished)" in text
    trained = next(line for line in text.splitlines() if "trained" in line)
    assert [cell.strip() for cell in trained.split("│")[1:-1]] == ["trained", "3", "6", "6", "30", "0.0", "33.3%"]
    as_json = json.loads(json.dumps(asdict(proof)))
    assert as_json["ok"] is True
    assert as_json["totals"]["failed"]["rollouts"] == 6
    assert as_json["totals"]["skipped"]["visits"] == 3


def test_verdict_of_a_wrong_account(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM visits WHERE visit = 11")
        db.execute("DELETE FROM outcomes WHERE visit = 11")
        db.execute("DELETE FROM visits WHERE visit = 3")
    assert verdict(account(path)).startswith("2 problems (10 visits, 18 rollouts")
