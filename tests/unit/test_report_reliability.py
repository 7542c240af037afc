"""Predicted against realised success, on the page of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winnow.study.report import write_report
from winnow.study.report_data import read_run

from ..builders.pages import Page, make_run
from ..builders.runs import metrics_of


def test_the_reliability_diagram_sums_over_steps_and_its_series_are_no_charts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    rows = metrics_of(run)
    for row in rows:
        row |= {f"gate/arrol/reliability/2/{k}": v for k, v in (("rollouts", 4.0), ("predicted", 1.0), ("right", 2.0))}
        row["gate/arrol/reliability/x/rollouts"] = 7.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([run], tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    found = page.data["runs"][0]["reliability"]
    assert found["points"] == [[0.25, 0.5, 4.0 * len({row["step"] for row in rows})]]
    assert "(ECE) 0.250" in found["caption"]
    assert not any("reliability" in key for key in page.data["runs"][0]["metrics"])
    assert read_run(make_run(tmp_path / "other", steps=4), max_samples=8).reliability is None


@pytest.mark.parametrize("key", ["9" * 5000, "12", "-1", "٣", "1.5", ""])
@pytest.mark.parametrize("value", [1e308, -50.0, 1e-308])
def test_a_hostile_reliability_diagram_stays_in_its_frame(tmp_path: Path, key: str, value: float) -> None:
    run = make_run(tmp_path / "run", steps=2)
    rows = metrics_of(run)
    for row in rows:
        for number in (key, "3"):
            row |= {f"gate/arrol/reliability/{number}/{k}": value for k in ("rollouts", "predicted", "right")}
        row |= {f"gate/arrol/reliability/4/{k}": v for k, v in (("rollouts", 2), ("predicted", 900), ("right", 1e9))}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run(run, max_samples=8).reliability
    assert found is not None
    assert [point[:2] for point in found["points"]] == [[1.0, 1.0]]
