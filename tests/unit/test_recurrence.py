"""GRESO's figure 4a from the ledger, against a count by hand."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from pathlib import Path

from winnow.record.ledger import Ledger
from winnow.record.proof import LONGEST_GAP
from winnow.study.report import write_report
from winnow.study.report_data import read_run
from winnow.types import Fate, Group, GroupKind, Prompt, Verdict, Visit

from .fake_run import finished

PROMPTS = [Prompt(f"p{i}", i, text="") for i in range(6)]


def play(ledger: Ledger, seed: int, epochs: int) -> dict[int, list[tuple[int, str]]]:
    """Visits at random, some skipped, cut, failed or still in flight; returns (epoch, kind) of those judged."""
    rng = random.Random(seed)
    judged: dict[int, list[tuple[int, str]]] = defaultdict(list)
    number = 0
    for epoch in range(epochs):
        for prompt in rng.sample(PROMPTS, len(PROMPTS)):
            keep = rng.random() < 0.4
            visit = Visit(number, epoch, prompt, Verdict(keep, "" if keep else "skipped"))
            number += 1
            ledger.visit([visit], step=0, version=0)
            if not keep or rng.random() < 0.1:
                continue
            kind = rng.choice(["none", "easy", "hard", "cut", "failed"])
            outcome = {"none": [0.0, 1.0], "easy": [1.0, 1.0], "hard": [0.0, 0.0], "failed": [None, None]}.get(kind)
            group: Group = finished(visit, Verdict(False, "stuck: x") if outcome is None else list(outcome))
            for r in group.rollouts:
                r.fate = r.fate or Fate.FILTERED
            ledger.finish(group, step=0)
            if kind in ("none", "easy", "hard"):
                judged[prompt.ordinal].append((epoch, kind))
    return judged


def test_equals_a_count_by_hand(tmp_path: Path) -> None:
    for seed in range(4):
        with Ledger.open(tmp_path / f"{seed}.sqlite") as ledger:
            judged = play(ledger, seed, epochs=60)
            found = ledger.recurrence()
        by_hand: dict[int, list[bool]] = defaultdict(list)
        for visits in judged.values():
            for (epoch, kind), (later, again) in itertools.pairwise(visits):
                if kind != "none":
                    by_hand[min(later - epoch, LONGEST_GAP)].append(again != "none")
        assert found == [(gap, len(zero), sum(zero)) for gap, zero in sorted(by_hand.items())]
        assert len(found) >= 5


def test_equal_rewards_count_where_nothing_tells_right_from_wrong(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        for epoch in range(3):
            visit = Visit(epoch, epoch, PROMPTS[0])
            ledger.visit([visit], step=0, version=0)
            group = finished(visit, [0.0, 0.0])
            group.kind = GroupKind.UNKNOWN
            for r in group.rollouts:
                r.fate = Fate.FILTERED
            ledger.finish(group, step=0)
        assert ledger.recurrence() == [(1, 2, 2)]


def test_what_was_voided_does_not_count(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        play(ledger, 0, epochs=20)
        before, mark = ledger.recurrence(), ledger.mark()
        visit = Visit(20 * len(PROMPTS), 20, PROMPTS[0])
        ledger.visit([visit], step=1, version=0)
        group = finished(visit, [0.0, 0.0])
        for r in group.rollouts:
            r.fate = Fate.FILTERED
        ledger.finish(group, step=1)
        assert ledger.recurrence() != before
        ledger.rollback(mark, reason="test")
        assert ledger.recurrence() == before


def test_nothing_visited_twice_gives_nothing_and_the_page_shows_the_rest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with Ledger.open(run / "ledger.sqlite") as ledger:
        assert ledger.recurrence() == []
        play(ledger, 1, epochs=40)
    write_report([run], tmp_path / "page.html")
    assert "zero-variance again" in (tmp_path / "page.html").read_text()
    shown = read_run(run, max_samples=0).proof["again"]["rows"]
    assert shown[0] == ["1", "5", "40.0%"]
    assert shown[-1] == ["10 and more", "1", "100.0%"]
