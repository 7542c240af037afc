"""`winnow tune` from a file to a file: what it measures and runs, what it writes, and how it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from winnow.config import load_config
from winnow.study import tune
from winnow.study.brief_runs import BriefRun

from ..builders.commands import winnow


@pytest.fixture
def file(tiny_config: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# mine\n" + yaml.safe_dump(tiny_config | {"advantage": "rloo", "reward_funcs": "tests.parity:parity_reward"})
    )
    return path


def test_a_file_with_reasons_and_a_page_is_written(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With seconds that steps of the size have, so that the choice does not depend on the machine."""
    monkeypatch.setattr(BriefRun, "per_step", property(lambda run: 1.0 + run.changes.get("prompts_per_step", 4) / 4))
    monkeypatch.setattr(tune, "SIZES", tune.SIZES[:2])
    monkeypatch.setattr(tune, "FEWEST_GROUPS", 16)
    output = tmp_path / "tuned.yaml"
    done = winnow("tune", file, "max_steps=5", "--minutes", "0.1", "-o", output, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    text = output.read_text()
    config = load_config(output)
    assert config.max_steps == 5
    for key, value in found["changes"].items():
        assert f"# was {key}: " in text
        assert yaml.safe_load(text)[key] == value
    assert any(run["settings"] == "given" and run["pass@1"] for run in found["runs"])
    assert found["costs_s"]["generate"].keys() >= {"decode_steps", "rows"}
    assert "<svg" in output.with_suffix(".html").read_text()
    assert not (tmp_path / "tuned.tune" / "run").exists()

    def never(*args: Any) -> None:
        raise AssertionError("a finished run was made again")

    monkeypatch.setattr(tune, "run_briefly", never)
    again = winnow("tune", file, "max_steps=5", "--minutes", "0.1", "-o", output, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["changes"] == found["changes"]
    other = winnow("tune", file, "max_steps=6", "-o", output)
    assert other.exit_code == 1
    assert "holds the runs of another configuration" in " ".join(other.output.split())


def test_an_interrupted_call_says_what_it_keeps(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def interrupted(c: Any, run: BriefRun, *rest: Any) -> None:
        runs.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "run_briefly", interrupted)
    done = winnow("tune", file, "--minutes", "0.1", "-o", tmp_path / "tuned.yaml")
    assert done.exit_code == 130
    assert "0 runs are in" in done.output
    assert "the same command continues" in " ".join(done.output.split())
    assert len(runs) == 1


def test_unknown_right_answers_are_told_before_costs_are_measured(file: Path) -> None:
    rewards = "reward_funcs=[tests.parity:parity_reward, tests.parity:parity_reward]"
    done = winnow("tune", file, rewards, "--minutes", "0.01", "-o", file.with_name("tuned.yaml"))
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "fit 1: success: this command counts right answers" in said
    assert "fit 2" not in said


def test_mistakes_are_refused_before_anything_runs(file: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["max_stps=3"], "unknown key 'max_stps'"),
        (["-o", str(file)], "name another YAML file"),
        (["-o", str(tmp_path / "tuned.txt")], "name another YAML file"),
    ):
        done = winnow("tune", file, *arguments)
        assert done.exit_code == 1
        assert message in " ".join(done.output.split())
