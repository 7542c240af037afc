"""Search over several steps and task types, against exhaustive search, and the gate it writes."""

from __future__ import annotations

import json
from itertools import product
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
from winnow.study.gate_calibration import config_section, lines
from winnow.study.gate_search import Bound, Search
from winnow.study.gate_tables import Recorded, read_recorded

from ..builders.calibrations import effect_of, jointly, one_step
from ..builders.gate_tables import T_MAX, make_rows, without, write

# Several steps, and task types.

SIGNAL = "action_entropy"


def small(tmp_path: Path, seed: int, ks: tuple[int, ...], *drop: str) -> dict[int, Recorded]:
    """One signal, values in tenths; some groups have ended by the later steps."""
    rows = [{k: v for k, v in r.items() if k not in drop} for r in make_rows(n=24, ks=ks, seed=seed)]
    signals = [s for s in rows[0] if s in ("prefix_edit_distance", "action_bigram_jaccard", "unique_prefix_ratio")]
    signals += [s for s in rows[0] if s in ("unique_action_ratio", "obs_unique_ratio", "termination_fraction")]
    return read_recorded(write(tmp_path / "g.csv", without(rows, *signals)))


def by_hand(recorded: dict[int, Recorded], thresholds: dict[int, float]) -> tuple[float, float, float]:
    """cut, rightly, share of steps saved: group by group, as a gate goes."""
    first = recorded[min(recorded)]
    cut = tp = saved = total = 0.0
    for task, zero in zip(first.columns["task_id"], first.zero_N, strict=True):
        rows = {k: at.columns["task_id"].tolist().index(task) for k, at in recorded.items()}
        if "steps" in first.columns:
            total += first.columns["steps"][rows[min(recorded)]]
        else:
            total += T_MAX
        for k, at in sorted(recorded.items()):
            if at.signal(SIGNAL)[rows[k]] < thresholds.get(k, 0.0) and at.running_N[rows[k]]:
                cut, tp = cut + 1, tp + zero
                measured = "steps" in at.columns and "steps_k" in at.columns
                saved += (at.columns["steps"] - at.columns["steps_k"])[rows[k]] if measured else T_MAX - k
                break
    return cut, tp, 100 * saved / total


@pytest.mark.parametrize("drop", [(), ("steps", "steps_k")])
@pytest.mark.parametrize("bound", [Bound(0.7, None), Bound(None, 0.15)])
@pytest.mark.parametrize("seed", range(4))
def test_two_steps_are_the_best_two(tmp_path: Path, seed: int, bound: Bound, drop: tuple[str, ...]) -> None:
    recorded = small(tmp_path, seed, (5, 10, 15), *drop)
    grid = [0.0, *(x / 10 + 0.05 for x in range(10))]
    teaching, best = float((~recorded[5].zero_N).sum()), 0.0
    for thresholds in product(grid, repeat=3):
        if 0 < sum(t > 0 for t in thresholds) <= 2:
            cut, tp, saved = by_hand(recorded, dict(zip((5, 10, 15), thresholds, strict=True)))
            if cut and bound.holds(np.array(cut), np.array(tp), teaching):
                best = max(best, saved)
    found = Search(bound, T_MAX, most=2).best(recorded)
    if found is None:
        assert best == 0
        return
    row = effect_of(recorded, found)
    assert row.saved_pct == pytest.approx(best)
    assert (row.cut, row.tp, row.saved_pct) == pytest.approx(by_hand(recorded, found.steps))
    assert len(found.steps) <= 2


@pytest.mark.parametrize("seed", range(3))
def test_three_steps_come_close_to_all_there_is(tmp_path: Path, seed: int) -> None:
    recorded, bound = small(tmp_path, seed, (5, 10, 15)), Bound(0.7, None)
    grid, best = [0.0, *(x / 10 + 0.05 for x in range(10))], 0.0
    for thresholds in product(grid, repeat=3):
        cut, tp, saved = by_hand(recorded, dict(zip((5, 10, 15), thresholds, strict=True)))
        if cut and tp >= 0.7 * cut - 1e-9:
            best = max(best, saved)
    found, two = (Search(bound, T_MAX, most=n).best(recorded) for n in (3, 2))
    assert found is not None
    assert two is not None
    saved, saved_by_two = effect_of(recorded, found).saved_pct, effect_of(recorded, two).saved_pct
    assert saved_by_two - 1e-9 <= saved <= best + 1e-9
    assert saved >= 0.9 * best


def test_one_step_is_what_calibrate_finds(tmp_path: Path) -> None:
    recorded = read_recorded(write(tmp_path / "g.csv", make_rows(n=60)))
    wanted = one_step(recorded, Bound(0.6, None))
    found = jointly(recorded, Bound(0.6, None), most=2)
    assert found.parts["one step"].plan == wanted.plan
    assert found.parts["one step"].effect.saved_pct == pytest.approx(wanted.chosen.measured_pct)
    assert found.parts["together"].effect == found.chosen
    assert found.chosen.saved_pct >= wanted.chosen.saved_pct
    assert found.held_out.cut > 0
    assert found.plan.rest is not None
    assert effect_of(recorded, found.plan.rest) == found.chosen
    assert jointly(recorded, Bound(0.6, None), most=2) == found
    mixed = [r | {"reward_var": 0.25, "label": "mixed"} for r in make_rows()]
    with pytest.raises(ConfigError, match="no threshold of any signal"):
        jointly(read_recorded(write(tmp_path / "g.csv", mixed)), Bound(0.8, None), most=2)


def test_several_steps_are_written_as_a_gate(tmp_path: Path) -> None:
    path, output = write(tmp_path / "g.csv", make_rows(n=60)), tmp_path / "gate.yaml"

    def run(*more: Any) -> Any:
        return CliRunner().invoke(app, ["gate", "calibrate", str(path), "--precision", "0.6", "--steps", "2", *more])

    chosen = json.loads(run("-o", str(output), "--json").stdout)["plan"]["rest"]
    [spec] = yaml.safe_load(output.read_text())["gates"]
    steps = {int(k): t for k, t in chosen["steps"].items()}
    assert method(GATES, spec, "gates") == Divergence(signal=chosen["signal"], steps=steps)
    shown = " ".join(run().stdout.split())
    assert "together" in shown
    assert "held out" in shown
    assert "go without --or-rule" in " ".join(run("--or-rule").stderr.split())


def typed(n: int = 130, seed: int = 0) -> list[dict[str, Any]]:
    """Types a and b of 40 groups, c of 40 that all teach, d of 10. What `a` is cut by says nothing about `b`."""
    rows = [r | {"task_type": "abcd"[min(int(r["task_id"][1:]) // 40, 3)]} for r in make_rows(n=n, seed=seed)]
    for r in rows:
        if r["task_type"] == "c":
            r |= {"reward_var": 0.25, "label": "mixed"}
        if r["task_type"] == "b":
            r["prefix_edit_distance"], r["action_entropy"] = r["action_entropy"], 1 - r["action_entropy"]
    return rows


@pytest.mark.parametrize("most", [1, 2])
def test_each_type_has_its_best_signal_within_the_bound(tmp_path: Path, most: int) -> None:
    recorded, bound = read_recorded(write(tmp_path / "g.csv", typed())), Bound(0.7, None)
    found = jointly(recorded, bound, most=most, per_task_type=True)
    assert sorted(found.plan.types) == ["a", "b", "c"], "ten groups are too few"
    assert found.plan.types["c"] is None, "nothing of it can be cut rightly"
    cut = tp = saved = steps = 0.0
    for kind in "abcd":
        part = {k: at.only(np.flatnonzero(at.columns["task_type"] == kind)) for k, at in recorded.items()}
        steps += part[10].columns["steps"].sum()
        if (own := found.plan.types.get(kind, found.plan.rest)) is not None:
            alone = effect_of(part, own)
            if kind in found.plan.types:
                assert own == Search(bound, T_MAX, most).best(part)
                assert alone.tp >= 0.7 * alone.cut
            cut, tp = cut + alone.cut, tp + alone.tp
            saved += alone.saved_pct * part[10].columns["steps"].sum()
    assert (found.chosen.cut, found.chosen.tp) == (cut, tp)
    assert found.chosen.saved_pct == pytest.approx(saved / steps)


def test_the_gate_cuts_each_type_by_its_own_signal(tmp_path: Path) -> None:
    """The section written, built as a gate, plans for every type what was chosen."""
    path, output = write(tmp_path / "g.csv", typed()), tmp_path / "gate.yaml"
    call = ["gate", "calibrate", str(path), "--precision", "0.7", "--per-task-type", "-o", str(output)]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.stderr
    assert "by type" in done.stdout
    options = method(GATES, yaml.safe_load(output.read_text())["gates"][0], "gates")
    assert isinstance(options, Divergence)
    plan = jointly(read_recorded(path), Bound(0.7, None), most=1, per_task_type=True).plan
    for kind in "abcdz":
        own = plan.types.get(kind, plan.rest)
        assert options.plan(kind) == ({} if own is None else own.steps)
        assert own is None or options.signal_of(kind) == own.signal


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
    with pytest.raises(ConfigError, match="no threshold of any signal"):
        jointly(recorded, Bound(0.8, None), most=1)
    found = jointly(recorded, Bound(0.8, None), most=1, per_task_type=True)
    assert found.plan.rest is None
    assert not found.parts["one step"].plan.cuts
    assert found.plan.types["b"] is None
    assert (found.chosen.cut, found.chosen.tp) == (40, 40)
    [spec] = yaml.safe_load(config_section(found))["gates"]
    options = method(GATES, spec, "gates")
    assert isinstance(options, Divergence)
    assert [options.plan(kind).get(10, 0.0) > 0.2 for kind in "abz"] == [True, False, False]
    assert "together   never cut" in lines(found)[0]
