"""Sweeps of a gate against loops written from the definitions, held-out effects, and what a sweep writes.

The paper's own numbers are checked when WINNOW_GATE_FEATURES names the released table of its ALFWorld groups.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.config.options import method
from winnow.methods.gate import GATES
from winnow.methods.gate.divergence import Divergence
from winnow.methods.gate.signals import SIGNALS
from winnow.study.gate_sweep import Effect, Sweep, Swept, config_section, run_sweep
from winnow.study.gate_tables import Recorded, read_recorded

from ..builders.gate_tables import T_MAX, command, make_rows, same, weighted, without, write

GRID = tuple(x / 20 for x in range(21))
"""Values are tenths: this is all there is."""
DIVERGENCES = [s for s in SIGNALS if s != "termination_fraction"]


def recorded_of(tmp_path: Path, **options: Any) -> dict[int, Recorded]:
    return read_recorded(write(tmp_path / "g.csv", make_rows(**options)))


def swept(recorded: dict[int, Recorded], precision: float = 0.8, **options: Any) -> Swept:
    return run_sweep(recorded, Sweep(T_MAX, precision, **options))[0]


# Against loops.


@pytest.mark.parametrize("count_ended", [False, True])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_sweep_is_what_counting_gives(tmp_path: Path, count_ended: bool, suffix: str) -> None:
    rows = make_rows()
    for r in rows:
        if r["task_id"] in ("t1", "t2", "t3", "t4"):
            r["steps_k"] = r["steps"]  # ended
    recorded = read_recorded(write(tmp_path / f"groups{suffix}", rows))
    thresholds = (0.0, 0.2, 0.3, 0.35, 1.0)
    got = iter(swept(recorded, signal="action_entropy", thresholds=thresholds, count_ended=count_ended).rows)
    for k in (10, 15):
        here = [r for r in rows if r["K"] == k]
        for threshold in thresholds:
            row = next(got)
            below = [r for r in here if r["action_entropy"] < threshold]
            cut = [r for r in below if count_ended or r["steps"] > r["steps_k"]]
            tp = [r for r in cut if r["label"] != "mixed"]
            teaching = [r for r in here if r["label"] == "mixed"]
            e = row.effect
            assert (row.k, row.threshold, e.groups) == (k, threshold, 40)
            assert (e.cut, e.tp, e.fp) == (len(cut), len(tp), len(cut) - len(tp))
            assert e.precision == (len(tp) / len(cut) if cut else None)
            assert e.recall == len(tp) / (40 - len(teaching))
            assert e.raw_pct == pytest.approx(100 * sum(T_MAX - k for _ in cut) / (40 * T_MAX))
            assert e.safe_pct == pytest.approx(100 * sum(T_MAX - k for _ in tp) / (40 * T_MAX))
            saved = sum(r["steps"] - r["steps_k"] for r in cut)
            assert e.measured_pct == pytest.approx(100 * saved / sum(r["steps"] for r in here))
            # The norm of GRPO's advantages, from rewards with such a variance: G - s successes of G = 8.
            full = kept = 0.0
            for r in here:
                successes = next(s for s in range(9) if math.isclose(s / 8 * (1 - s / 8), r["reward_var"]))
                rewards = np.array([1.0] * successes + [0.0] * (8 - successes))
                squares = float((((rewards - rewards.mean()) / (rewards.std() + 1e-9)) ** 2).sum())
                full += squares
                kept += squares * (r not in cut)
            assert e.kept_norm == pytest.approx(math.sqrt(kept / full), rel=1e-6)


def ranks(values: list[float]) -> list[float]:
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


def test_separation_is_what_pairs_give(tmp_path: Path) -> None:
    rows = make_rows(n=75)
    recorded = read_recorded(write(tmp_path / "g.csv", rows))
    parts = run_sweep(recorded, Sweep(T_MAX), by_task_type=True)
    assert [part.task_type for part in parts] == [None, "a", "b", "c"]
    for part in parts:
        assert len(part.rows) == 2 * 7
        for row in part.rows:
            here = [r for r in rows if r["K"] == row.k and part.task_type in (None, r["task_type"])]
            x, y = [r[row.signal] for r in here], [r["reward_var"] for r in here]
            assert row.rho == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-12)
            pairs = [(a, b) for a, u in zip(x, y, strict=True) for b, v in zip(x, y, strict=True) if u > 0 and v == 0]
            assert row.auroc == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a, b in pairs]), abs=1e-12)
            assert row.effect.groups == len(here)


def test_what_is_not_defined_is_null(tmp_path: Path) -> None:
    rows = [r | {"action_entropy": 0.5} for r in make_rows() if r["label"] == "mixed"]
    [part] = command(write(tmp_path / "g.csv", rows), "--k", 10)
    for row in part["rows"]:
        assert row["auroc"] is None
        assert row["threshold"] is None
        assert row["effect"]["precision"] is None
        assert (row["rho"] is None) == (row["signal"] == "action_entropy")
    assert part["chosen"] is None


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("aim", ["raw_pct", "measured_pct"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("precision", [0.8, 0.6])
def test_nothing_within_the_precision_saves_more(tmp_path: Path, seed: int, precision: float, aim: str) -> None:
    table = make_rows(seed=seed, n=60)
    table = table if aim == "measured_pct" else without(table, "steps", "steps_k")
    recorded = read_recorded(write(tmp_path / "g.csv", table))
    rows = [row for row in swept(recorded, thresholds=GRID).rows if row.signal in DIVERGENCES]
    within = [row for row in rows if row.effect.cut and row.effect.tp >= precision * row.effect.cut]
    found = swept(recorded, precision)
    if not within:
        assert found.chosen is None
        return
    best = max(within, key=lambda row: (round(getattr(row.effect, aim), 9), row.effect.tp)).effect
    assert found.chosen is not None
    assert found.effect is not None
    assert (getattr(found.effect, aim), found.effect.tp) == (pytest.approx(getattr(best, aim)), best.tp)
    assert found.effect.saved_pct == getattr(found.effect, aim)
    own = [row for row in found.rows if (row.k, row.signal) == (found.chosen.k, found.chosen.signal)]
    assert [(row.threshold, row.effect) for row in own] == [(found.chosen.threshold, found.effect)]


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
    as_in_paper = swept(recorded, 0.65, count_ended=True).effect
    assert as_in_paper is not None
    assert as_in_paper.precision == pytest.approx(0.70, abs=0.005)
    assert swept(recorded, 0.65).chosen is None
    found = swept(recorded, 0.3)
    assert found.effect is not None
    assert (found.effect.cut, found.effect.tp, found.effect.fp) == (30, 11, 19)
    assert found.effect.precision == pytest.approx(0.37, abs=0.005)
    assert (found.held_out.cut, found.held_out.tp) == (30, 11)
    assert found.at_random is not None
    assert (found.at_random.cut, found.at_random.precision) == (pytest.approx(30), pytest.approx(11 / 67))
    assert found.oracle is not None
    assert (found.oracle.cut, found.oracle.recall) == (11, 11 / 44), "nor can an oracle stop who has ended"
    shown = CliRunner().invoke(app, ["gate", str(tmp_path / "g.csv")]).stdout
    assert f"at K = 10 somebody still runs in {'at most ' if drop[1:] else ''}67 of 100" in " ".join(shown.split())


def test_who_ended_is_not_always_known(tmp_path: Path) -> None:
    """Nothing tells: all count, and the answer says so."""
    path = ended_table(tmp_path / "g.csv", "steps", "steps_k", "termination_fraction")
    found = swept(read_recorded(path), 0.65).effect
    assert found is not None
    assert (found.cut, found.tp, found.measured_pct) == (63, 44, None)
    shown = CliRunner().invoke(app, ["gate", str(path), "--precision", "0.6"]).stdout
    assert "at most 100 of 100 groups (the table has no" in " ".join(shown.split())


# Held out, and the controls.


def test_held_out_figures_are_those_of_choices_without_the_group(tmp_path: Path) -> None:
    recorded = recorded_of(tmp_path, n=61)
    fold_N = np.empty(61, int)
    fold_N[np.random.default_rng(0).permutation(61)] = np.arange(61) % 5
    cut = tp = saved = 0.0
    for fold in range(5):
        others = {k: at.only(np.flatnonzero(fold_N != fold)) for k, at in recorded.items()}
        choice = swept(others, 0.6).chosen
        if choice is not None:
            at = recorded[choice.k].only(np.flatnonzero(fold_N == fold))
            cut_N = (at.signal(choice.signal) < choice.threshold) & at.running_N
            cut, tp = cut + cut_N.sum(), tp + (cut_N & at.zero_N).sum()
            saved += (at.columns["steps"] - at.columns["steps_k"])[cut_N].sum()
    found = swept(recorded, 0.6).held_out
    assert (found.groups, found.cut, found.tp) == (61, cut, tp)
    assert found.measured_pct == pytest.approx(100 * saved / recorded[10].columns["steps"].sum())


def test_on_pure_noise_only_the_held_out_figures_tell(tmp_path: Path) -> None:
    """Signals that know nothing: the chosen gate looks precise, held out it is as good as chance."""
    rng = np.random.default_rng(0)
    chosen, held = [], []
    for seed in range(12):
        rows = [r | {s: float(rng.random()) for s in SIGNALS} for r in make_rows(n=60, seed=seed)]
        found = swept(read_recorded(write(tmp_path / "g.csv", rows)))
        assert found.effect is not None
        chosen.append(found.effect.precision)
        held.append((found.held_out.tp, found.held_out.cut))
    assert min(chosen) >= 0.8  # type: ignore[type-var]
    assert sum(t for t, _ in held) / sum(c for _, c in held) < 0.55


def test_random_cuts_and_the_oracle(tmp_path: Path) -> None:
    recorded = recorded_of(tmp_path, n=60, ks=(10,))
    found = swept(recorded, 0.6)
    gate, random, oracle = found.effect, found.at_random, found.oracle
    assert gate is not None
    assert random is not None
    assert oracle is not None
    rng = np.random.default_rng(0)
    zero_N = np.arange(60) < gate.zero
    hits = [zero_N[rng.permutation(60)[: round(gate.cut)]].sum() for _ in range(4000)]
    assert recorded[10].running_N.all()
    assert random.tp == pytest.approx(np.mean(hits), abs=0.2)
    assert random.precision == pytest.approx(zero_N.mean())
    assert random.raw_pct == pytest.approx(gate.raw_pct)
    assert gate.measured_pct is not None
    assert random.measured_pct is not None
    assert oracle.measured_pct is not None
    assert 0 < random.measured_pct < 100 * gate.cut / 60
    kept = np.mean([1 - (gate.cut - h) / (~zero_N).sum() for h in hits])
    assert random.kept_norm == pytest.approx(math.sqrt(kept), abs=0.01)
    assert (oracle.cut, oracle.fp, oracle.precision) == (zero_N.sum(), 0, 1.0)
    assert oracle.safe_pct == pytest.approx(100 * zero_N.mean() * (T_MAX - 10) / T_MAX)


# The gate it writes.


def test_what_it_writes_is_a_gate(tmp_path: Path) -> None:
    path, output = write(tmp_path / "g.csv", make_rows(n=60)), tmp_path / "gate.yaml"
    [part] = command(path, "-o", output, "--precision", "0.6")
    [spec] = yaml.safe_load(output.read_text())["gates"]
    assert method(GATES, spec, "gates") == Divergence(**part["chosen"])
    shown = CliRunner().invoke(app, ["gate", str(path), "--precision", "0.6"])
    assert shown.exit_code == 0
    assert "oracle" in shown.stdout
    assert "held out" in shown.stdout
    assert "threshold:" in shown.stdout
    assert "…" not in shown.stdout


def typed(n: int = 130, seed: int = 0) -> list[dict[str, Any]]:
    """Types a and b of 40 groups, c of 40 that all teach, d of 10. What `a` is cut by says nothing about `b`."""
    rows = [r | {"task_type": "abcd"[min(int(r["task_id"][1:]) // 40, 3)]} for r in make_rows(n=n, seed=seed)]
    for r in rows:
        if r["task_type"] == "c":
            r |= {"reward_var": 0.25, "label": "mixed"}
        if r["task_type"] == "b":
            r["prefix_edit_distance"], r["action_entropy"] = r["action_entropy"], 1 - r["action_entropy"]
    return rows


def test_each_type_has_its_best_gate(tmp_path: Path) -> None:
    """And the section written, built as a gate, plans for every type what was chosen."""
    path, output = write(tmp_path / "g.csv", typed()), tmp_path / "gate.yaml"
    recorded, sweep = read_recorded(path), Sweep(T_MAX, 0.7)
    parts = {part.task_type: part for part in run_sweep(recorded, sweep, by_task_type=True)}
    assert list(parts) == [None, "a", "b", "c"], "ten groups are too few"
    assert parts["c"].chosen is None, "nothing of it can be cut rightly"
    for kind in "abc":
        alone = {k: at.only(np.flatnonzero(at.columns["task_type"] == kind)) for k, at in recorded.items()}
        assert swept(alone, 0.7) == Swept(None, *list(vars(parts[kind]).values())[1:])
    command(path, "--precision", "0.7", "--by", "task_type", "-o", output)
    options = method(GATES, yaml.safe_load(output.read_text())["gates"][0], "gates")
    assert isinstance(options, Divergence)
    for kind in "abcdz":
        own = parts.get(kind, parts[None]).chosen
        assert options.of_type(kind).steps == ({} if own is None else {own.k: own.threshold})
        assert own is None or options.of_type(kind).signal == own.signal


def test_a_type_is_cut_where_no_gate_for_all_would_do(tmp_path: Path) -> None:
    rows = [r for r in make_rows(n=80) if r["K"] == 10]
    for i, r in enumerate(rows):
        worthless = i % 2 == 0
        r |= {
            "task_type": "ab"[i % 2],
            "reward_var": 0.0 if worthless else 0.25,
            "label": "all_fail" if worthless else "mixed",
        }
        r |= dict.fromkeys(("action_entropy", "prefix_edit_distance"), 0.4 if worthless else 0.2)
    keep = ("K", "task_id", "task_type", "reward_var", "label", "steps", "steps_k", "action_entropy")
    recorded = read_recorded(write(tmp_path / "g.csv", [{k: r[k] for k in keep} for r in rows]))
    parts = run_sweep(recorded, Sweep(T_MAX), by_task_type=True)
    assert [part.chosen is None for part in parts] == [True, False, True]
    assert parts[1].effect is not None
    assert (parts[1].effect.cut, parts[1].effect.tp) == (40, 40)
    [spec] = yaml.safe_load(config_section(parts, 0.8))["gates"]
    options = method(GATES, spec, "gates")
    assert isinstance(options, Divergence)
    assert [options.of_type(kind).steps.get(10, 0.0) > 0.2 for kind in "abz"] == [True, False, False]


def test_a_run_directory_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "gate.jsonl").write_text("".join(json.dumps(r) + "\n" for r in make_rows(n=60)))
    path = write(tmp_path / "g.csv", make_rows(n=60))
    assert command(tmp_path, "--precision", 0.6) == command(path, "--precision", 0.6)


# Weights.


def test_a_group_of_weight_w_counts_like_w_groups(tmp_path: Path) -> None:
    for seed in range(5):
        heavy, many = weighted(make_rows(seed=seed))
        one = swept(read_recorded(write(tmp_path / "w.csv", heavy)), 0.6)
        other = swept(read_recorded(write(tmp_path / "m.csv", without(many, "weight"))), 0.6)
        assert one.chosen == other.chosen
        pairs = [(a.effect, b.effect) for a, b in zip(one.rows, other.rows, strict=True)]
        pairs += [(one.at_random, other.at_random), (one.oracle, other.oracle)]  # type: ignore[list-item]
        for a, b in pairs:
            assert isinstance(a, Effect)
            same(a, b)
        for x, y in zip(one.rows, other.rows, strict=True):
            assert (x.auroc, x.rho) == (pytest.approx(y.auroc), pytest.approx(y.rho))


def test_weights_of_one_change_nothing_and_bad_ones_are_refused(tmp_path: Path) -> None:
    plain = read_recorded(write(tmp_path / "p.csv", make_rows()))
    ones = read_recorded(write(tmp_path / "1.csv", [r | {"weight": 1.0} for r in make_rows()]))
    assert "weight" not in ones[10].columns
    assert swept(ones, 0.6) == swept(plain, 0.6)
    with pytest.raises(
        ConfigError, match=r"row 1: 'weight': Input should be greater than or equal to 1 \(got '0\.5'\)"
    ):
        read_recorded(write(tmp_path / "x.csv", [r | {"weight": 0.5} for r in make_rows()]))


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--signal", "prefix_edit_distanse"], "Did you mean 'prefix_edit_distance'"),
        (["--thresholds", "low,high"], "expected numbers separated by commas"),
        (["--thresholds", "nan"], "expected numbers"),
        (["--k", "5"], "there is no K = 5; it has 10, 15"),
        (["--t-max", "15"], "K = 15 is not below t_max = 15"),
        (["--map", "K"], "expected name=column"),
        (["--by", "colour"], "only task_type"),
        (["-o", "/nowhere/gate.yaml"], "its folder does not exist"),
        (["--signal", "action_entropy", "--thresholds", "0", "-o", "gate.yaml"], "no threshold of any signal"),
        (["--picture", "p.jpeg"], "ends in .png, .svg, .pdf"),
        (["--picture", "no/p.png"], "does not exist"),
    ],
)
def test_bad_arguments_are_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "g.csv", make_rows())
    result = CliRunner().invoke(app, ["gate", str(path), *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_steps_with_different_groups_and_hopeless_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hold different groups, e.g. 't0'"):
        swept(read_recorded(write(tmp_path / "g.csv", make_rows()[1:])))
    with pytest.raises(ConfigError, match="4 groups cannot be split into 5 folds"):
        swept(read_recorded(write(tmp_path / "g.csv", make_rows(n=4))))
    bare = read_recorded(write(tmp_path / "g.csv", without(make_rows(), "task_type")))
    with pytest.raises(ConfigError, match="no column 'task_type'"):
        run_sweep(bare, Sweep(T_MAX), by_task_type=True)


def test_a_group_at_the_top_of_the_scale_needs_no_impossible_threshold(tmp_path: Path) -> None:
    """All zero-variance, all values 1: no threshold in [0, 1] cuts anything."""
    rows = [r | dict.fromkeys(SIGNALS, 1.0) | {"reward_var": 0.0, "label": "all_fail"} for r in make_rows()]
    assert swept(read_recorded(write(tmp_path / "g.csv", rows)), 0.5).chosen is None
