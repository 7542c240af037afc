"""What a run does to its directory, to what else is there, and where it cannot write, lock or remove."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from winnow import Trainer
from winnow.record.progress import Display
from winnow.record.records import RunDirectoryError, lock, read_metrics
from winnow.run import checkpoint
from winnow.run.callbacks import TrainerState
from winnow.study.report_data import read_run

from ..builders.runs import assert_clean, resume, train
from ..parity import parity_reward


@pytest.mark.parametrize("name", ["model", "metrics.jsonl", "samples.jsonl"])
def test_files_of_others_stay(tiny_config: dict[str, Any], name: str) -> None:
    """A model next to which somebody trains is not a leftover of this run."""
    path = Path(tiny_config["output_dir"], name)
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(RunDirectoryError, match=f"has {name}, which a run would replace; choose another output_dir"):
        Trainer(config=tiny_config, reward_funcs=parity_reward)
    assert path.read_text() == "mine"


def test_a_resume_that_cannot_start_keeps_the_model(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config | {"max_steps": 1})
    run = Path(tiny_config["output_dir"])
    with monkeypatch.context() as patched:
        patched.setattr("winnow.record.records.Trackers", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            resume(run, {"max_steps": 2})
    assert (run / "model").is_dir()
    resume(run, {"max_steps": 2})
    assert_clean(run)


def test_the_working_directory_may_change(
    tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook with `%cd`, or where a reward function changes it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = {"output_dir": "here", "max_steps": 3, "save_steps": 1, "max_lag": 1}
    with Trainer(config=tiny_config | settings, reward_funcs=parity_reward) as trainer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        trainer.step()
        monkeypatch.chdir(tmp_path)
        trainer.step()
        monkeypatch.chdir(tmp_path / "elsewhere")
        trainer.step()
        trainer.finish()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "here" / "model").is_dir()
    assert_clean(tmp_path / "here")


@pytest.mark.parametrize("text", ["could not convert: '4[/INST]'", "[/]", "[bold]"])
def test_brackets_in_a_warning(text: str) -> None:
    """They are no markup, although rich's consoles take them for it."""
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    Display(console, start=0, max_steps=1).warn(text)
    assert text in console.export_text()


def test_messages_with_values_that_json_lacks(tiny_config: dict[str, Any]) -> None:
    """Columns of a data set next to role and content; samples show them as text."""
    extra = {"at": datetime(2026, 1, 1, tzinfo=UTC), "weight": float("nan")}
    messages = [{"role": "user", "content": "1 2 3", **extra}]
    rows = [{"prompt": messages, "id": str(i)} for i in range(8)]
    config = {key: value for key, value in tiny_config.items() if key != "env"}
    config |= {"max_steps": 1, "eval_steps": None, "log_completions": 2}
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    Trainer(config=config | {"chat_template": template}, train_dataset=rows, reward_funcs=by_length).train()
    lines = Path(tiny_config["output_dir"], "samples.jsonl").read_text().splitlines()
    (message,) = json.loads(lines[0])["prompt"]
    assert (message["at"], message["weight"]) == ("2026-01-01 00:00:00+00:00", "nan")


def by_length(completions: list[Any], **columns: Any) -> list[float]:
    return [float(i % 2) for i, _ in enumerate(completions)]


def saved_state(run: Path, **more: Any) -> Callable[[int], Path]:
    state = {"loop": {}, "ledger": {}} | more

    def save(step: int) -> Path:
        return checkpoint.save(run, step, state, lambda folder: (folder / "weights").touch(), keep_last=1)

    return save


def test_what_cannot_be_removed_now_is_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, which keeps the files of a checkpoint that somebody reads."""
    save, rmtree = saved_state(tmp_path), shutil.rmtree

    def busy(path: Any, ignore_errors: bool = False) -> None:
        if ".removing" not in str(path):
            rmtree(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        for step in (1, 2, 3):
            save(step)
    assert checkpoint.steps(tmp_path) == [3]
    assert list((tmp_path / "checkpoints").glob(".removing-*"))
    save(4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


def test_a_state_of_any_size_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting groups of long rollouts take more than the gigabyte that other JSON files may have."""
    state = saved_state(tmp_path)(1) / "state.json"
    fstat = os.fstat

    def large(file: int) -> Any:
        found = fstat(file)
        return SimpleNamespace(st_mode=found.st_mode, st_size=1 << 34)

    monkeypatch.setattr(os, "fstat", large)
    assert checkpoint.parsed(state) == {"loop": {}, "ledger": {}}
    assert checkpoint.marks(tmp_path) == {"checkpoints/step-000001/state.json": {}}


def test_an_error_of_the_records_does_not_keep_the_lock(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(config=tiny_config, reward_funcs=parity_reward)
    trainer.add_callback(SimpleNamespace(on_step_end=lambda *_, **__: 1 / 0))
    full = OSError(errno.ENOSPC, "No space left on device")
    closed = []
    monkeypatch.setattr(trainer._parts.rewarder, "close", lambda: closed.append(True))
    monkeypatch.setattr("winnow.record.records.Trackers.close", lambda *_, **__: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert closed
    lock(Path(tiny_config["output_dir"])).close()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = lock(tmp_path)
    with pytest.raises(RunDirectoryError, match="another run is using"):
        lock(tmp_path)
    held.close()

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(RunDirectoryError, match=r"file system has no locks \(No locks available\)"):
        lock(tmp_path)


def test_a_damaged_line_of_the_metrics_costs_no_run(tiny_config: dict[str, Any]) -> None:
    train(tiny_config | {"max_steps": 2})
    run = Path(tiny_config["output_dir"])
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    spoilt = [*lines[:-1], b"x" * (len(lines[-1]) - 1) + b"\n"]
    (run / "metrics.jsonl").write_bytes(b"".join(spoilt))
    with pytest.warns(UserWarning, match=rf"metrics\.jsonl:{len(lines)}: damaged"):
        resume(run, {"max_steps": 3})
    with pytest.warns(UserWarning, match="damaged"):
        assert [row["step"] for row in read_metrics(run)][-1] == 3


@pytest.mark.parametrize("name", ["rewards/mine/std", "eval/pass@1", "tokens/mine"])
def test_logged_names_that_a_run_gives_a_meaning(tiny_config: dict[str, Any], name: str) -> None:
    def judge(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        log_metric(name, 1.0)
        return [float(i % 2) for i, _ in enumerate(completions)]

    with pytest.warns(UserWarning, match=f"log_metric: '{name}' is a metric of the run"):
        Trainer(config=tiny_config | {"max_steps": 1, "eval_steps": None}, reward_funcs=judge).train()
    assert name not in list(read_metrics(Path(tiny_config["output_dir"])))[-1]


def test_names_of_metrics_are_kept_once() -> None:
    """A history of 100,000 steps would hold a hundred new strings a step."""
    state = TrainerState()
    first, second = (state.log({f"{'a'}/{name}": 1.0 for name in ("x", "y")}) for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert sys.getrefcount(next(iter(first))) > 2


def test_the_page_has_the_day_of_the_start(tiny_config: dict[str, Any]) -> None:
    train(tiny_config | {"max_steps": 1})
    run = Path(tiny_config["output_dir"])
    os.utime(run / "start.json", (0, 10 * 86400 + 43200))
    assert read_run(run, max_samples=1).begun == "1970-01-11"
