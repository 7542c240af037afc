"""What users of data, rewards and commands met after the first days."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from winnow import Trainer
from winnow.cli.console import settings
from winnow.config import validate
from winnow.config.paths import absolute_paths
from winnow.env.presets import PRESETS
from winnow.env.rewards.math import gold_answer
from winnow.env.rewards.pooled import completion_text
from winnow.env.rewards.rewarder import Rewarder, without_taken
from winnow.env.row_files import DataError, Row
from winnow.env.rows import rows_of
from winnow.env.workers import bubblewrap, bwrap_worker
from winnow.env.workers.bubblewrap import SandboxError
from winnow.record.records import CONFIG, LEDGER
from winnow.run.callbacks import CallbackArguments
from winnow.study.compare_data import read_run_data

from ..builders.rewards import group, score_all, scored
from ..parity import parity_reward


def test_a_mean_of_nothing_is_left_out() -> None:
    def judge(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        for value in (math.nan, math.inf, 1.0):
            log_metric("a", value)
        log_metric("b", math.nan)
        return [1.0] * len(completions)

    assert scored(judge, group("x")).pop_logged() == {"a": 1.0}


def test_the_names_of_a_run_are_its_own() -> None:
    def judge(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("step", 3.0)
        log_metric("mine", 1.0)
        return [1.0] * len(completions)

    with pytest.warns(UserWarning, match="log_metric: 'step' is a metric of the run"):
        assert without_taken(scored(judge, group("x")).pop_logged(), {"step": 1.0}) == {"mine": 1.0}


def test_the_two_rows_of_math_without_braces() -> None:
    for solution, gold in (("So it is $\\boxed 2$.", "2"), ("Thus $x = \\boxed 9$", "9"), ("\\fbox{4}", "4")):
        row = Row("MATH, row", 1, {"problem": "?", "solution": solution})
        assert PRESETS["math"](row)["ground_truth"] == gold
    with pytest.raises(DataError, match=r"has no \\boxed"):
        PRESETS["math"](Row("MATH, row", 1, {"problem": "?", "solution": "It is 2."}))


def test_missing_values_of_a_frame_are_no_answers() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"prompt": ["a", "b"], "ground_truth": ["1", np.nan], "answer": ["2", "3"], "when": [pandas.NaT, pandas.NaT]}
    )
    rows = [row.values for row in rows_of(frame, "train_dataset")]
    assert [gold_answer(row) for row in rows] == ["1", "3"]
    assert rows[1]["when"] is None


def test_a_frame_that_is_not_of_pandas_is_no_rows() -> None:
    """Such as one of polars, which iterates over its columns."""

    class Frame:
        columns = ("prompt",)

        def to_dict(self) -> dict[str, list[str]]:
            return {"prompt": ["a"]}

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[list[str]]:
            return iter(self.to_dict().values())

    with pytest.raises(DataError, match=r"train_dataset, row 1: expected a mapping .*, found list"):
        list(rows_of(Frame(), "train_dataset"))


def test_a_message_of_calls_alone_has_no_text() -> None:
    assert completion_text([{"role": "assistant", "tool_calls": []}]) == ""
    assert completion_text([{"role": "assistant", "content": None}]) == ""


def test_an_installation_in_usr_shows_no_local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(stdout="/x/venv\n/usr\n")
    monkeypatch.setattr(bubblewrap.subprocess, "run", lambda *args, **options: answer)
    monkeypatch.setattr(bubblewrap.os, "access", lambda *args: True)
    assert bubblewrap._installation("/x/venv/bin/python") == ["/x/venv"]


def test_a_home_directory_is_not_shown_by_another_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, link = tmp_path / "data" / "home", tmp_path / "link"
    home.mkdir(parents=True)
    link.symlink_to(home)
    monkeypatch.setattr(bwrap_worker.sys, "path", [])
    for where, named in ((home, link), (home.parent, home)):
        monkeypatch.chdir(where)
        monkeypatch.setenv("HOME", str(named))
        with pytest.raises(SandboxError, match="everything there would be shown"):
            bwrap_worker.Cage()


def test_the_best_metric_may_have_winnows_name() -> None:
    for name in ("reward", "eval_reward", "eval/reward"):
        c = validate({"model": "m", "env": "countdown", "metric_for_best_model": name, "eval_steps": 1})
        assert CallbackArguments(c).metric_for_best_model == "eval_reward"


def test_a_dotted_key_changes_a_runs_own_section(tmp_path: Path) -> None:
    (tmp_path / LEDGER).touch()
    (tmp_path / CONFIG).write_text('{"engine": {"name": "local", "dtype": "float32"}, "filter": "keep_all"}')
    values = settings(["engine.slots=64", "eval_prompts=8"], model=str(tmp_path))
    assert values == {"engine": {"name": "local", "dtype": "float32", "slots": 64}, "eval_prompts": 8}
    assert settings(["engine.name=auto"], model=str(tmp_path))["engine"]["name"] == "auto"
    assert settings(["engine.slots=64"], model="a/model")["engine"] == {"name": "auto", "slots": 64}


def test_values_of_held_out_rollouts_are_not_those_of_training() -> None:
    def judge(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("length", float(len(completions[0])))
        return [1.0] * len(completions)

    rewarder = Rewarder(judge)
    score_all(rewarder, [group("x"), replace(group("held out", number=1), purpose="eval")])
    assert rewarder.pop_logged() == {"length": 1.0}
    rewarder.close()


def test_packages_of_the_system_are_seen_in_a_cage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pip installs as root, Winnow itself is there."""
    monkeypatch.setattr(bwrap_worker.sys, "path", ["/usr/lib", "/usr/local/lib"])
    monkeypatch.setattr(bwrap_worker, "bubblewrapped", lambda python, disk, files, shown: shown)
    monkeypatch.setattr(bwrap_worker.os, "geteuid", lambda: 1000)
    shown = bwrap_worker.Cage()._command
    assert "/usr/local/lib" in shown
    assert "/usr/lib" not in shown


def test_a_run_that_a_callback_ended_is_not_damaged(tiny_config: dict[str, Any]) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 3

    values = tiny_config | {"max_steps": 6, "eval_steps": 2, "success": {"at_least": 1.0}}
    Trainer(config=values, reward_funcs=parity_reward, callbacks=[Stop()]).train()
    notes = read_run_data(Path(values["output_dir"])).notes
    assert [note.partition(": ")[2] for note in notes] == ["It was ended at step 3 of 6; its last evaluation is of 2."]


def test_files_of_agents_and_teachers_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    values = {"env": {"name": "agent", "agent": "mine.py:solve"}, "teacher": {"model": "teacher"}}
    found = absolute_paths(values)
    assert found["env"]["agent"] == f"{tmp_path}/mine.py:solve"
    assert found["teacher"]["model"] == f"{tmp_path}/teacher"
    of_server = {"teacher": {"model": "teacher", "url": "http://127.0.0.1:1"}}
    assert absolute_paths(of_server)["teacher"]["model"] == "teacher"


def test_names_of_rewards_are_no_paths_and_links_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("math", "rewards", "blobs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blobs" / "3f2a").touch()
    (tmp_path / "train.jsonl").symlink_to(tmp_path / "blobs" / "3f2a")
    names = ["math", "rewards:score"]
    found = absolute_paths({"reward_funcs": names, "env": {"name": "dataset", "path": "train.jsonl"}})
    assert found["reward_funcs"] == names
    assert found["env"]["path"] == f"{tmp_path}/train.jsonl"
