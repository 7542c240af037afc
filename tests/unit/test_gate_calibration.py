"""Calibration against exhaustive search, its honesty on held-out groups, and what it writes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from winnow.cli.main import app
from winnow.config import ConfigError, method
from winnow.methods.gate import GATES
from winnow.methods.gate.divergence import Divergence
from winnow.methods.gate.signals import SIGNALS
from winnow.study.gate_effect import sweep
from winnow.study.gate_search import Bound, Choice
from winnow.study.gate_tables import Recorded, correlate, read_recorded

from ..builders.calibrations import chosen, jointly, one_step
from ..builders.gate_tables import T_MAX, command, make_rows, same, weighted, without, write

# One step.


def recorded_of(tmp_path: Path, **options: Any) -> dict[int, Recorded]:
    return read_recorded(write(tmp_path / "g.csv", make_rows(**options)))


@pytest.mark.parametrize("aim", ["raw_pct", "measured_pct"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bound", [Bound(0.8, None), Bound(0.6, None), Bound(None, 0.1), Bound(None, 0.0)])
def test_nothing_within_the_bound_saves_more(tmp_path: Path, seed: int, bound: Bound, aim: str) -> None:
    table = make_rows(seed=seed, n=60)
    recorded = read_recorded(
        write(tmp_path / "g.csv", table if aim == "measured_pct" else without(table, "steps", "steps_k"))
    )
    rows = [
        row
        for signal in SIGNALS
        if signal != "termination_fraction"
        for k, at in recorded.items()
        for row in sweep(  # of those that can be cut; values are tenths: this is all there is
            {k: at.only(np.flatnonzero(at.running_N))}, signal, [x / 20 for x in range(21)], T_MAX
        )
    ]
    teaching = sum(var > 0 for var in recorded[10].columns["reward_var"])
    within = [
        r
        for r in rows
        if r.cut
        and (
            r.tp / r.cut >= bound.precision
            if bound.precision is not None
            else r.tp / r.cut >= 1 - bound.signal_loss * teaching / r.cut - 1e-9  # type: ignore[operator]
        )
    ]
    if not within:
        with pytest.raises(ConfigError, match="no threshold of any signal"):
            one_step(recorded, bound)
        return

    def saved(row: Any) -> float:
        """Steps of the groups that are cut, as a share of those of all groups."""
        at = recorded[row.k]
        if aim == "raw_pct":
            return float(100 * row.cut * (T_MAX - row.k) / (60 * T_MAX))
        steps_N, steps_k_N = at.columns["steps"], at.columns["steps_k"]
        cut_N = (at.signals[row.signal] < row.threshold) & at.running_N
        return float(100 * (steps_N - steps_k_N)[cut_N].sum() / steps_N.sum())

    best = max(within, key=lambda r: (round(saved(r), 9), r.tp))
    found = one_step(recorded, bound).chosen
    assert (getattr(found, aim), found.tp) == (pytest.approx(saved(best)), best.tp)
    same = {found.k: recorded[found.k].only(np.flatnonzero(recorded[found.k].running_N))}
    [again] = sweep(same, found.signal, [found.threshold], T_MAX)
    assert (again.cut, again.tp, again.precision) == (found.cut, found.tp, found.precision)


def ended_table(path: Path, *drop: str) -> Path:
    """100 groups that agree (63) or not (37); of the 44 worthless among the 63 nobody runs any more in 33."""
    rows = []
    for i in range(100):
        zero, ended, low = i < 44, i < 33, i < 63
        row = {"K": 10, "task_id": f"t{i}", "reward_var": 0.0 if zero else 0.25, "termination_fraction": float(ended)}
        row |= {
            "prefix_edit_distance": 0.1 if low else 0.9,
            "steps": 72 if ended else 240,
            "steps_k": 72 if ended else 80,
        }
        rows.append({key: v for key, v in row.items() if key not in drop})
    return write(path, rows)


@pytest.mark.parametrize("drop", [(), ("termination_fraction",), ("steps", "steps_k")])
def test_a_group_that_has_ended_is_no_cut(tmp_path: Path, drop: tuple[str, ...]) -> None:
    """Of 63 converged groups 44 are worthless, 0.70, but of the 30 that can still be stopped 11 are, 0.37."""
    recorded = read_recorded(ended_table(tmp_path / "g.csv", *drop))
    [all_of_them] = sweep(recorded, "prefix_edit_distance", [0.5], T_MAX)
    assert all_of_them.precision == pytest.approx(0.70, abs=0.005), "as the paper's table 1 counts"
    with pytest.raises(ConfigError, match=r"no threshold of any signal has precision >= 0\.65"):
        one_step(recorded, Bound(0.65, None))
    found = one_step(recorded, Bound(0.3, None))
    assert (found.chosen.cut, found.chosen.tp, found.chosen.fp) == (30, 11, 19)
    assert found.chosen.precision == pytest.approx(0.37, abs=0.005)
    assert (found.held_out.cut, found.held_out.tp) == (30, 11)
    assert found.intervals["precision"][1] < 0.6  # type: ignore[index]
    assert (found.random.cut, found.random.precision) == (30, pytest.approx(11 / 67))
    assert (found.oracle.cut, found.oracle.recall) == (11, 11 / 44), "nor can an oracle stop who has ended"
    assert found.can_be_cut.startswith(f"at K = 10 somebody still runs in {'at most ' if drop[1:] else ''}67 of 100")
    assert one_step(recorded, Bound(None, 0.34)).chosen.fp == 19, "19 of all 56 groups that teach"
    with pytest.raises(ConfigError, match="signal loss"):
        one_step(recorded, Bound(None, 0.33))


def test_who_ended_is_not_always_known(tmp_path: Path) -> None:
    """Nothing tells: all count, and the answer says so; a sweep says that it counts all anyway."""
    path = ended_table(tmp_path / "g.csv", "steps", "steps_k", "termination_fraction")
    found = one_step(read_recorded(path), Bound(0.65, None))
    assert (found.chosen.cut, found.chosen.tp) == (63, 44)
    assert found.can_be_cut.startswith("at K = 10 somebody still runs in at most 100 of 100 groups (the table has no")
    shown = CliRunner().invoke(app, ["gate", "calibrate", str(path), "--precision", "0.6"]).stdout
    assert "at most 100 of 100 groups" in " ".join(shown.split())
    shown = CliRunner().invoke(app, ["gate", "sweep", str(ended_table(tmp_path / "g.csv"))]).stdout
    assert "somebody still runs in 67 of 100 groups; as in the paper, all are counted" in " ".join(shown.split())


def test_the_intervals_are_those_of_resampled_groups(tmp_path: Path) -> None:
    recorded = recorded_of(tmp_path, n=60)
    found = one_step(recorded, Bound(0.6, None))
    at, row = recorded[found.chosen.k], found.chosen
    cut_N, zero_N = at.signals[row.signal] < row.threshold, at.zero_N
    draws = np.random.default_rng(5).integers(60, size=(10_000, 60))
    cut_R, tp_R = cut_N[draws].sum(1), (cut_N & zero_N)[draws].sum(1)
    zero_R = zero_N[draws].sum(1)
    share = 100 * (T_MAX - row.k) / (60 * T_MAX)
    by_hand = {
        "precision": tp_R / cut_R,
        "recall": tp_R / zero_R,
        "raw_pct": cut_R * share,
        "safe_pct": tp_R * share,
        "kept_norm": np.sqrt(1 - (cut_R - tp_R) / (60 - zero_R)),
    }
    assert set(by_hand) == set(found.intervals)
    for name, values in by_hand.items():
        low, high = np.quantile(values, [0.025, 0.975])
        tolerance = 1.01 * share if name.endswith("_pct") else 0.04  # quantiles of counts differ by one group
        assert found.intervals[name] == pytest.approx((low, high), abs=tolerance)


def test_folds_hold_every_group_once_and_judge_what_others_chose(tmp_path: Path) -> None:
    recorded = recorded_of(tmp_path, n=61)
    found = one_step(recorded, Bound(0.6, None), folds=4)
    assert sorted(f.effect.groups for f in found.folds) == [15, 15, 15, 16]
    assert found.held_out.cut == sum(f.effect.cut for f in found.folds)
    assert found.held_out.raw_pct == pytest.approx(
        sum(
            100 * f.effect.cut * (T_MAX - k) / (61 * T_MAX)
            for f in found.folds
            if f.plan.rest
            for k in f.plan.rest.steps
        )
    )
    assert one_step(recorded, Bound(0.6, None), folds=4) == found


def test_on_pure_noise_only_the_held_out_figures_tell(tmp_path: Path) -> None:
    """Signals that know nothing: the chosen gate looks precise, held out it is as good as chance."""
    rng = np.random.default_rng(0)
    chosen, held = [], []
    for seed in range(12):
        rows = [r | {s: float(rng.random()) for s in SIGNALS} for r in make_rows(n=60, seed=seed)]
        found = one_step(read_recorded(write(tmp_path / "g.csv", rows)), Bound(0.8, None))
        chosen.append(found.chosen.precision)
        cut, tp = found.held_out.cut, found.held_out.tp
        held.append((tp, cut))
    assert min(chosen) >= 0.8  # type: ignore[type-var]
    assert sum(t for t, _ in held) / sum(c for _, c in held) < 0.55  # type: ignore[arg-type]


def test_random_and_oracle_arms(tmp_path: Path) -> None:
    recorded = recorded_of(tmp_path, n=60, ks=(10,))
    found = one_step(recorded, Bound(0.6, None))
    row, rng = found.chosen, np.random.default_rng(0)
    zero_N = np.arange(60) < round(row.tp / row.recall)  # type: ignore[operator]
    hits = [zero_N[rng.permutation(60)[: row.cut]].sum() for _ in range(4000)]
    assert recorded[row.k].running_N.all()
    assert found.random.tp == pytest.approx(np.mean(hits), abs=0.2)
    assert found.random.precision == pytest.approx(zero_N.mean())
    assert found.random.raw_pct == row.raw_pct
    assert row.measured_pct is not None
    assert found.random.measured_pct is not None
    assert found.oracle.measured_pct is not None
    assert 0 < found.random.measured_pct < 100 * row.cut / 60
    kept = np.mean([1 - (row.cut - h) / (~zero_N).sum() for h in hits])
    assert found.random.kept_norm == pytest.approx(math.sqrt(kept), abs=0.01)
    assert (found.oracle.cut, found.oracle.fp, found.oracle.precision) == (zero_N.sum(), 0, 1.0)
    assert found.oracle.safe_pct == pytest.approx(100 * zero_N.mean() * (T_MAX - row.k) / T_MAX)


def test_what_it_writes_is_a_gate(tmp_path: Path) -> None:
    path, output = write(tmp_path / "g.csv", make_rows(n=60)), tmp_path / "gate.yaml"
    result = CliRunner().invoke(
        app, ["gate", "calibrate", str(path), "-o", str(output), "--json", "--precision", "0.6"]
    )
    chosen = json.loads(result.stdout)["chosen"]
    [spec] = yaml.safe_load(output.read_text())["gates"]
    wanted = Divergence(signal=chosen["signal"], k=chosen["k"], threshold=chosen["threshold"])
    assert method(GATES, spec, "gates") == wanted
    shown = CliRunner().invoke(app, ["gate", "calibrate", str(path), "--precision", "0.6"])
    assert shown.exit_code == 0
    assert "oracle" in shown.stdout
    assert "held out (5 folds)" in shown.stdout
    assert "threshold:" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "0.8", "--signal-loss", "0.1"], "give one of them"),
        (["--t-max", "12"], "K = 15 is not below t_max = 12"),
        (["-o", "/nowhere/gate.yaml"], "its folder does not exist"),
    ],
)
def test_bad_arguments_are_one_clear_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = write(tmp_path / "g.csv", make_rows())
    result = CliRunner().invoke(app, ["gate", "calibrate", str(path), *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_steps_with_different_groups_and_hopeless_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hold different groups, e.g. 't0'"):
        one_step(read_recorded(write(tmp_path / "g.csv", make_rows()[1:])), Bound(0.8, None))
    with pytest.raises(ConfigError, match="4 groups cannot be split into 5 folds"):
        one_step(read_recorded(write(tmp_path / "g.csv", make_rows(n=4))), Bound(0.8, None))
    mixed = [r | {"reward_var": 0.25, "label": "mixed"} for r in make_rows()]
    with pytest.raises(ConfigError, match=r"no threshold of any signal has precision >= 0.8"):
        one_step(read_recorded(write(tmp_path / "g.csv", mixed)), Bound(0.8, None))


def test_a_group_at_the_top_of_the_scale_needs_no_impossible_threshold(tmp_path: Path) -> None:
    """All zero-variance, all values 1: no threshold in [0, 1] cuts anything."""
    rows = [r | dict.fromkeys(SIGNALS, 1.0) | {"reward_var": 0.0, "label": "all_fail"} for r in make_rows()]
    with pytest.raises(ConfigError, match="no threshold"):
        one_step(read_recorded(write(tmp_path / "g.csv", rows)), Bound(0.5, None))


def test_the_interval_of_a_heavy_group_is_wide(tmp_path: Path) -> None:
    """The bootstrap draws groups that were seen, not those they stand for."""
    heavy, many = weighted(make_rows(n=60))
    tables = [write(tmp_path / f"{i}.csv", rows) for i, rows in enumerate((heavy, without(many, "weight")))]
    width = []
    for path in tables:
        low, high = one_step(read_recorded(path), Bound(0.6, None)).intervals["precision"]  # type: ignore[misc]
        width.append(high - low)
    assert width[0] > 1.3 * width[1]


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
    found, wanted = (one_step(table, Bound(0.6, None), or_rule=True) for table in (one, other))
    assert found.plan == wanted.plan
    for a, b in ((found.random, wanted.random), (found.oracle, wanted.oracle)):
        same(a, b)


def test_weights_of_one_change_nothing_and_bad_ones_are_refused(tmp_path: Path) -> None:
    plain = read_recorded(write(tmp_path / "p.csv", make_rows()))
    ones = read_recorded(write(tmp_path / "1.csv", [r | {"weight": 1.0} for r in make_rows()]))
    assert "weight" not in ones[10].columns
    assert one_step(ones, Bound(0.6, None)) == one_step(plain, Bound(0.6, None))
    with pytest.raises(
        ConfigError, match=r"row 1: 'weight': Input should be greater than or equal to 1 \(got '0\.5'\)"
    ):
        read_recorded(write(tmp_path / "x.csv", [r | {"weight": 0.5} for r in make_rows()]))


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
    found = one_step(recorded, bound, or_rule=True)
    assert found.chosen.measured_pct == pytest.approx(max(r.measured_pct for r in rows))  # type: ignore[type-var]
    assert found.chosen.tp >= 0.6 * found.chosen.cut
    c = chosen(found)
    [(k, threshold)] = c.steps.items()
    [again] = sweep({k: recorded[k]}, c.signal, [threshold], T_MAX, c.termination)
    assert again == found.chosen
    alone = one_step(recorded, bound).chosen.measured_pct
    assert found.chosen.measured_pct >= alone  # type: ignore[operator]


def test_what_the_choice_cuts_is_what_the_gate_cuts(tmp_path: Path) -> None:
    """The section written, built as a gate, is the choice."""
    path, output = write(tmp_path / "g.csv", make_rows(n=80)), tmp_path / "gate.yaml"
    command("calibrate", path, "--precision", 0.6, "--or-rule", "-o", output)
    options = method(GATES, yaml.safe_load(output.read_text())["gates"][0], "gates")
    assert isinstance(options, Divergence)
    c = chosen(one_step(read_recorded(path), Bound(0.6, None), or_rule=True))
    found = options.signal, options.plan(), options.termination
    assert found == (c.signal, c.steps, c.termination)


def test_what_a_table_lacks_is_named(tmp_path: Path) -> None:
    bare = read_recorded(write(tmp_path / "g.csv", without(make_rows(), "steps", "steps_k", "task_type")))
    with pytest.raises(ConfigError, match="needs the columns steps, steps_k and termination_fraction"):
        one_step(bare, Bound(0.6, None), or_rule=True)
    with pytest.raises(ConfigError, match="no column 'task_type'"):
        jointly(bare, Bound(0.6, None), most=1, per_task_type=True)
    assert str(Choice("action_entropy", {5: 0.25}, 0.9)) == "action_entropy < 0.25 or termination_fraction >= 0.9 at 5"


def test_from_a_run_directory(tmp_path: Path) -> None:
    import json

    (tmp_path / "gate.jsonl").write_text("".join(json.dumps(r) + "\n" for r in make_rows(n=60)))
    one, other = (command("calibrate", *how, tmp_path, "--precision", 0.6) for how in (["--from"], []))
    assert one == other
    for arguments in ([], [str(tmp_path), "--from", str(tmp_path)]):
        result = CliRunner().invoke(app, ["gate", "calibrate", *arguments])
        assert result.exit_code == 1
        assert "give one of a table and --from RUN_DIRECTORY" in " ".join(result.stderr.split())


def test_the_papers_buffer(buffer: Path) -> None:
    """At K = 10 six groups have ended, all worthless: of the paper's 21 cuts 17 are possible, of which 13 are right,
    and no threshold of any signal is right in 80% of its cuts."""
    with pytest.raises(AssertionError, match=r"no threshold of any signal has precision >= 0\.8"):
        command("calibrate", buffer, "--k", 10, "--precision", 0.8, "--t-max", 30)
    at = read_recorded(buffer)[10]
    cut_N = (at.signals["prefix_edit_distance"] < 0.12) & at.running_N
    assert (cut_N.sum(), (cut_N & at.zero_N).sum()) == (17, 13)
    found = command("calibrate", buffer, "--k", 10, "--precision", 0.7, "--t-max", 30)
    assert found["chosen"]["precision"] >= 0.7
    assert found["oracle"]["cut"] == 33
    assert found["random"]["precision"] == pytest.approx(33 / 94)
