"""Every script starts, every arm is a valid configuration, and the notebook is what the JSON files give."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from winnow.config import load_config
from winnow.record.stop_conditions import OutOfMemoryError, RunStoppedError

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = [path.stem for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
OPTIONAL = {"trl", "datasets", "ray", "vllm", "psutil", "matplotlib"}
"""Packages that a script may need and an environment may not have."""
FAMILIES = ("tuned", "selection", "stopping", "lag", "pretrained", "distillation")
HELP = """
import contextlib, importlib, io, sys
for command in sys.argv[1:]:
    text = io.StringIO()
    name, *arguments = command.split()
    sys.argv = [name, *arguments, "--help"]
    try:
        module = importlib.import_module(name)
        with contextlib.redirect_stdout(text):
            module.main()
    except SystemExit as error:
        assert error.code == 0, (command, error.code)
    except ModuleNotFoundError as error:
        print("MISSING", error.name, command)
        continue
    assert "python benchmarks/" in text.getvalue(), command
    print("OK", "-", command)
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def family_of(name: str) -> Any:
    return importlib.import_module("claims").load(name)


@pytest.mark.slow
def test_every_script_and_every_benchmark_answers_help() -> None:
    commands = [*SCRIPTS, *(f"bench {name}" for name in importlib.import_module("bench").BENCHMARKS)]
    done = subprocess.run(
        [sys.executable, "-c", HELP, *commands], cwd=BENCHMARKS, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith(("OK", "MISSING"))]
    assert [line[2] for line in lines] == commands
    assert {line[1] for line in lines if line[0] == "MISSING"} <= OPTIONAL


def test_every_script_has_a_name_in_the_registry() -> None:
    bench = importlib.import_module("bench")
    with_a_run = {
        path.stem for path in BENCHMARKS.glob("*.py") if "def run(options:" in path.read_text(encoding="utf-8")
    }
    assert with_a_run == {bench.MODULES.get(name, name) for name in bench.BENCHMARKS}


@pytest.mark.slow
def test_what_benchmarks_import_within_functions_is_there() -> None:
    missing = []
    for path in [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("families/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("winnow"):
                missing += [
                    (path.name, f"{node.module}.{a.name}") for a in node.names if not is_there(node.module, a.name)
                ]
    assert not missing


def is_there(module: str | None, name: str) -> bool:
    assert module is not None
    try:
        return hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError as error:
        return error.name in OPTIONAL


def test_every_family_is_checked_here() -> None:
    assert set(FAMILIES) == set(importlib.import_module("claims").FAMILIES)


def test_the_notebook_is_what_the_json_files_give() -> None:
    claims = importlib.import_module("claims")
    page = (ROOT / "docs" / "claims-appendix.md").read_text(encoding="utf-8")
    assert page == claims.notebook(claims.RESULTS), "python benchmarks/claims.py --docs docs/claims-appendix.md"
    assert not [name for name in claims.tables_of(claims.RESULTS) if f"`{name}`\n" not in page]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_arm_is_a_valid_configuration(name: str) -> None:
    family = family_of(name)
    assert len(family.by_name()) == len(family.arms), "names are unique"
    for arm in family.arms:
        config = load_config(ROOT / "recipes" / f"{arm.recipe}.yaml", [*arm.overrides, "model=m"])
        assert config.model == "m"
        if arm.start is not None:
            load_config(ROOT / "recipes" / f"{arm.start.recipe}.yaml", ["model=m", "gates=[]"])


def test_models_come_before_runs_and_a_shared_one_is_made_once() -> None:
    arms = family_of("stopping").by_name()
    stages = importlib.import_module("claims").stages([arms["countdown-grpo"], arms["chain-sum-grpo"]], 2)
    runs = [("countdown-grpo", 2), ("chain-sum-grpo", 2)]
    assert stages == [[("warm-countdown", 2), ("warm-chain-sum", 0)], [], runs]
    banded = family_of("selection").by_name()["active-band"]
    assert importlib.import_module("claims").stages([banded], 1)[1] == [("pass-rates", 1)]


def test_what_has_left_a_claim_is_not_done_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    claims = importlib.import_module("claims")
    options = Namespace(work=tmp_path, seeds=[0], jobs=1, changes=["no_such_key=1"])
    arm = family_of("lag").by_name()["lag0-tis8"]
    for name in ("warm-s0", "lag0-tis8-s0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "claim.json").write_text("{}", encoding="utf-8")
    assert claims.run_all("lag", [arm], options)
    assert not capfd.readouterr().out, "no process was started"


def test_a_table_blanks_the_baseline_and_pairs_by_seed() -> None:
    t = importlib.import_module("tables")
    runs = {
        "base": [{"seed": seed, "pass": value, "cost": 4.0} for seed, value in enumerate((0.1, 0.2, 0.3))],
        "arm": [{"seed": seed, "pass": value, "cost": 2.0} for seed, value in enumerate((0.2, 0.3, 0.4))],
        "short": [{"seed": 1, "pass": 0.5, "cost": 8.0}],
    }
    columns = (t.SEEDS, t.mean("mean", "pass"), t.difference("difference", "pass"), t.ratio("cost", "cost"))
    lines = t.table_of(runs, columns, base="base").splitlines()
    assert lines[0] == "| arm | seeds | mean | difference | cost |"
    assert lines[2] == "| base | 3 | 0.200 (-0.048 to 0.448) |  | 1.00 (1.00 to 1.00) |"
    assert lines[3] == "| arm | 3 | 0.300 (0.052 to 0.548) | +0.100 (+0.100 to +0.100) | 0.50 (0.50 to 0.50) |"
    assert lines[4] == "| short | 1 | 0.500 | +0.300 | 2.00 |"


def test_runs_that_were_not_done_again_keep_their_figures() -> None:
    t = importlib.import_module("tables")
    old = {"a": [{"seed": 0, "x": 1}, {"seed": 1, "x": 2}], "gone": [{"seed": 0, "x": 9}]}
    new = {"a": [{"seed": 1, "x": 3}], "b": [{"seed": 0, "x": 4}]}
    merged = t.merged(old, new)
    assert merged == old | {"a": [{"seed": 0, "x": 1}, {"seed": 1, "x": 3}], "b": [{"seed": 0, "x": 4}]}


def test_the_cost_to_a_level_is_paired_and_says_what_misses_it() -> None:
    t = importlib.import_module("tables")
    base = [{"seed": seed, "curve": [[0, 0, 0, 0.0], [1, 100, 10, 0.5]]} for seed in (0, 1)]
    fast = [
        {"seed": 0, "curve": [[0, 0, 0, 0.0], [1, 50, 5, 0.6]]},
        {"seed": 1, "curve": [[0, 0, 0, 0.0], [1, 9, 1, 0.1]]},
    ]
    assert t.to_level("", 1.0).cell(fast, base) == "0.42; 1 of 2 did not get there"
    assert t.to_level("", 1.0, "rollouts").cell(fast, base) == "0.42; 1 of 2 did not get there"
    assert t.to_level("", 1.0, "seconds").cell(fast, base) == ""


def test_sides_take_turns_in_changing_order_and_a_warm_round_does_not_count() -> None:
    in_turn = importlib.import_module("harness").in_turn
    asked: list[str] = []

    def side(name: str) -> Any:
        return lambda: asked.append(name) or len(asked)

    rounds = in_turn({"a": side("a"), "b": side("b")}, 2, warm=True)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert rounds == [{"a": 4, "b": 3}, {"a": 5, "b": 6}]


@pytest.mark.parametrize(
    ("recipe", "arm"),
    [("thrifty", "mopps-shared-lr2"), ("chain-sum-thrifty", "chain-thrifty-shared-twice-linear-lr1")],
)
def test_a_recipe_is_the_arm_that_was_measured(recipe: str, arm: str) -> None:
    measured = importlib.import_module("families.tuned").FAMILY.by_name()[arm]
    configs = [
        load_config(str(ROOT / "recipes" / f"{name}.yaml"), [*changes, "output_dir=runs/same"])
        for name, changes in ((recipe, []), (measured.recipe, list(measured.overrides)))
    ]
    assert configs[0] == configs[1]


def test_a_run_without_memory_is_not_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops as nothing teaches it counts, with its last checkpoint. One that lost its memory does not."""
    claims = importlib.import_module("claims")
    family = claims.load("tuned")
    arm = family.by_name()["chain-thrifty-lr1"]
    claim = tmp_path / f"{arm.name}-s0" / "claim.json"

    def ends_with(error: Exception) -> None:
        def train(*args: Any) -> None:
            raise error

        monkeypatch.setattr(claims, "train", train)
        claims.train_arm(arm, family, 0, tmp_path, [])

    monkeypatch.setattr("winnow.run.standalone.evaluate_model", lambda *args: {"pass@1": 0.5})
    with pytest.raises(OutOfMemoryError):
        ends_with(OutOfMemoryError("step 3: out of memory"))
    assert not claim.exists()
    ends_with(RunStoppedError("step 3: solved"))
    assert json.loads(claim.read_text())["stopped"] == "step 3: solved"
