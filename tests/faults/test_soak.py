"""The soak itself: a few trials, whose totals add up, and which go on where they were stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .soak import Process, Trial, count, soak, totals


@pytest.mark.slow
def test_a_few_trials(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert all("problem" not in line for line in soak(log, faults=2, hours=1))
    first = totals(log)
    assert first["faults"] >= 2
    lines = [*soak(log, faults=first["faults"] + 1, hours=1)]
    assert lines[0]["trial"] == first["trials"], "trials of the log are not run again"
    found = totals(log)
    assert found["faults"] == first["faults"] + sum(count(line["faults"]) for line in lines)
    promised = [line for line in map(json.loads, log.read_text().splitlines()) if "refused" not in line]
    compared = [line for line in promised if not line["processes"] and not line["sharing"]]
    assert found["compared bit by bit"] == len(compared)
    assert len(promised) + found["refused"] == found["trials"]
    assert found["problems"] == []


@pytest.mark.slow
def test_a_run_that_is_not_the_same_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a soak without problems would say nothing."""
    original = Trial.launch

    def another(self: Trial, run: Path, **environment: str) -> Process:
        self.settings["seed"] = int(run.name == "part")
        return original(self, run, **environment)

    monkeypatch.setattr(Trial, "launch", another)
    line = next(soak(tmp_path / "log", faults=1, hours=1))
    assert "differs in" in line["problem"]
    assert json.loads((tmp_path / "log").read_text())["problem"] == line["problem"]
