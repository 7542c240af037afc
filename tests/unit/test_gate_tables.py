"""Tables with weights, calibration of the OR rule and of task types, and pictures."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from winnow.cli.main import app
from winnow.config import method, validate
from winnow.methods.gate import GATES
from winnow.methods.gate.divergence import Divergence
from winnow.methods.gate.recording import rows_of
from winnow.methods.gate.signals import SIGNALS
from winnow.record.records import Records
from winnow.study.gate_tables import ReplayError, correlate, read_recorded, sweep
from winnow.study.joint import choose_jointly
from winnow.study.replay_stats import Bound, Choice, calibrate
from winnow.types import Turn

from ..builders.groups import make_group
from .test_replay import T_MAX, command, make_rows, without, write
from .test_replay_stats import recorded_of


def weighted(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows with weights 1 to 4, and the table in which every group is there as often as it weighs."""
    heavy = [r | {"weight": 1 + int(r["task_id"][1:]) % 4} for r in rows]
    return heavy, [r | {"task_id": f"{r['task_id']}.{i}"} for r in heavy for i in range(r["weight"])]


def same(a: Any, b: Any) -> None:
    for name in vars(a):
        x, y = getattr(a, name), getattr(b, name)
        assert x == y or (x is not None and math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12)), (name, x, y)


@pytest.mark.parametrize("seed", range(5))
def test_a_group_of_weight_w_counts_like_w_groups(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("scipy")
    heavy, many = weighted(make_rows(seed=seed))
    one = read_recorded(write(tmp_path / "w.csv", heavy))
    other = read_recorded(write(tmp_path / "m.csv", [{k: v for k, v in r.items() if k != "weight"} for r in many]))
    rows = zip(
        sweep(one, "action_entropy", [0.2, 0.4], T_MAX, 0.5),
        sweep(other, "action_entropy", [0.2, 0.4], T_MAX, 0.5),
        strict=True,
    )
    for a, b in rows:
        same(a, b)
    for x, y in zip(correlate(one), correlate(other), strict=True):
        same(replace(x, p_value=None), replace(y, p_value=None))
        assert x.p_value is None
    found, wanted = (calibrate(table, Bound(0.6, None), T_MAX, or_rule=True) for table in (one, other))
    assert found.choice == wanted.choice
    for a, b in ((found.random, wanted.random), (found.oracle, wanted.oracle)):
        same(a, b)


def test_weights_of_one_change_nothing_and_bad_ones_are_refused(tmp_path: Path) -> None:
    plain = read_recorded(write(tmp_path / "p.csv", make_rows()))
    ones = read_recorded(write(tmp_path / "1.csv", [r | {"weight": 1.0} for r in make_rows()]))
    assert ones[10].weight_N is None
    assert calibrate(ones, Bound(0.6, None), T_MAX) == calibrate(plain, Bound(0.6, None), T_MAX)
    with pytest.raises(ReplayError, match=r"row 1: 'weight' must be in \[1, 1e12\], not 0\.5"):
        read_recorded(write(tmp_path / "x.csv", [r | {"weight": 0.5} for r in make_rows()]))


def test_the_interval_of_a_heavy_group_is_wide(tmp_path: Path) -> None:
    """The bootstrap draws groups that were seen, not those they stand for."""
    heavy, many = weighted(make_rows(n=60))
    tables = [write(tmp_path / f"{i}.csv", rows) for i, rows in enumerate((heavy, without(many, "weight")))]
    width = []
    for path in tables:
        low, high = calibrate(read_recorded(path), Bound(0.6, None), T_MAX).intervals["precision"]  # type: ignore[misc]
        width.append(high - low)
    assert width[0] > 1.3 * width[1]


@pytest.mark.parametrize("seed", range(6))
def test_nothing_by_the_or_rule_saves_more(tmp_path: Path, seed: int) -> None:
    recorded, bound = recorded_of(tmp_path, n=60, seed=seed), Bound(0.6, None)
    grid = [x / 20 for x in range(1, 21)]  # values are tenths: this is all there is
    rows = [
        row
        for signal in SIGNALS
        if signal != "termination_fraction"
        for limit in (None, *grid)
        for row in sweep(recorded, signal, grid, T_MAX, limit)
        if row.cut and row.tp >= 0.6 * row.cut
        # A threshold that cuts nobody of itself is the limit alone, which is no divergence gate.
        if (recorded[row.k].signals[signal] < row.threshold).any()
    ]
    found = calibrate(recorded, bound, T_MAX, or_rule=True)
    assert found.chosen.measured_pct == pytest.approx(max(r.measured_pct for r in rows))  # type: ignore[type-var]
    assert found.chosen.tp >= 0.6 * found.chosen.cut
    k, c = found.choice.k, found.choice
    [again] = sweep({k: recorded[k]}, c.signal, [c.threshold], T_MAX, c.termination)
    assert again == found.chosen
    alone = calibrate(recorded, bound, T_MAX).chosen.measured_pct
    assert found.chosen.measured_pct >= alone  # type: ignore[operator]


def test_what_the_choice_cuts_is_what_the_gate_cuts(tmp_path: Path) -> None:
    """The section written, built as a gate, is the choice."""
    path, output = write(tmp_path / "g.csv", make_rows(n=80)), tmp_path / "gate.yaml"
    command("calibrate", path, "--precision", 0.6, "--or-rule", "-o", output)
    options = method(GATES, yaml.safe_load(output.read_text())["gates"][0], "gates")
    assert isinstance(options, Divergence)
    c = calibrate(read_recorded(path), Bound(0.6, None), T_MAX, or_rule=True).choice
    found = options.signal, options.k, options.threshold, options.termination
    assert found == (c.signal, c.k, c.threshold, c.termination)


def test_what_a_table_lacks_is_named(tmp_path: Path) -> None:
    bare = read_recorded(write(tmp_path / "g.csv", without(make_rows(), "steps", "steps_k", "task_type")))
    with pytest.raises(ReplayError, match="needs the columns steps, steps_k and termination_fraction"):
        calibrate(bare, Bound(0.6, None), T_MAX, or_rule=True)
    with pytest.raises(ReplayError, match="no column 'task_type'"):
        choose_jointly(bare, Bound(0.6, None), T_MAX, most=1, per_task_type=True)
    assert str(Choice("action_entropy", 5, 0.25, 0.9)) == "action_entropy < 0.25 or termination_fraction >= 0.9 at 5"


# Runs.


def test_a_group_weighs_the_inverse_of_its_chance() -> None:
    group = make_group(0, [1.0, 0.0])
    for rollout in group.rollouts:
        rollout.turns, rollout.survival_p = [Turn("a", "o", 0, 1, "eos", taken=True)], 0.2
    assert rows_of(group, [1])[0]["weight"] == 5.0
    group.rollouts[0].survival_p = 1.0
    with pytest.raises(ValueError, match="unlike chances"):
        rows_of(group, [1])


@pytest.mark.parametrize(
    ("options", "written"), [({}, True), ({"gates": ["random"]}, False), ({"gates": ["random"], "audit": {}}, True)]
)
def test_only_a_run_that_knows_what_is_missing_writes_the_table(
    tmp_path: Path, options: dict[str, Any], written: bool
) -> None:
    Records(tmp_path, validate({"model": "m", "env": "countdown", **options}), max_turns=9).close()
    assert (tmp_path / "gate.jsonl").exists() == written


def test_from_a_run_directory(tmp_path: Path) -> None:
    import json

    (tmp_path / "gate.jsonl").write_text("".join(json.dumps(r) + "\n" for r in make_rows(n=60)))
    one, other = (command("calibrate", *how, tmp_path, "--precision", 0.6) for how in (["--from"], []))
    assert one == other
    for arguments in ([], [str(tmp_path), "--from", str(tmp_path)]):
        result = CliRunner().invoke(app, ["gate", "calibrate", *arguments])
        assert result.exit_code == 1
        assert "give one of a table and --from RUN_DIRECTORY" in " ".join(result.stderr.split())


# Pictures.

COMMANDS = (["sweep"], ["correlate"], ["calibrate", "--precision", "0.6"])


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_picture_says_what_was_found(tmp_path: Path, arguments: list[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    heavy, _ = weighted(make_rows(n=60))
    path = str(write(tmp_path / "g.csv", heavy))
    for name in ("p.png", "p.svg"):
        result = CliRunner().invoke(app, ["gate", *arguments, path, "--picture", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "p.svg").read_text()
    wanted = {
        "sweep": ["threshold of prefix_edit_distance: cut below it", "% right", "safe saving, % of all steps"],
        "correlate": ["AUROC for non-zero variance", "zero variance (", "K = 15"],
        "calibrate": ["precision held out", "oracle", "chosen", "(measured)"],
    }
    for words in wanted[arguments[0]]:
        assert words in text, "in the drawing, as a comment beside its glyphs"


@pytest.mark.parametrize(("name", "message"), [("p.jpeg", "ends in .png, .svg, .pdf"), ("no/p.png", "does not exist")])
def test_pictures_that_cannot_be_are_refused(tmp_path: Path, name: str, message: str) -> None:
    path = str(write(tmp_path / "g.csv", make_rows()))
    result = CliRunner().invoke(app, ["gate", "sweep", path, "--picture", str(tmp_path / name)])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = str(write(tmp_path / "g.csv", make_rows()))
    result = CliRunner().invoke(app, ["gate", "sweep", path, "--picture", str(tmp_path / "p.png")])
    assert result.exit_code == 1
    assert "[gate]'" in "".join(result.stderr.split())
