"""Every tracker for real: a run that is interrupted and goes on, and what each then has, beside metrics.jsonl."""

from __future__ import annotations

import json
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.utils.tensorboard

from tests.parity import parity_reward
from winnow import ConfigError, Trainer
from winnow.config import validate
from winnow.config.paths import as_saved
from winnow.record import trackers
from winnow.record.trackers import TRACKERS, Trackers, check_trackers

from ..builders.runs import metrics_of
from ..builders.wandb_files import frames

NAMES = list(TRACKERS)


def of_wandb(run: Path) -> tuple[dict[int, dict[str, float]], dict[str, Any]]:
    """Metrics by step, and what W&B knows of the run."""
    from wandb.proto import wandb_internal_pb2 as pb

    found: dict[int, dict[str, float]] = {}
    known: dict[str, set[str]] = {"id": set(), "name": set()}
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for frame in frames(file):
            record = pb.Record()
            record.ParseFromString(frame)
            if record.WhichOneof("record_type") == "run":
                known["id"].add(record.run.run_id)
                known["name"].add(record.run.display_name)
            elif record.WhichOneof("record_type") == "history":
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                found[int(row["train/global_step"])] = row
    return found, known


def of_tensorboard(run: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, found = EventAccumulator(str(run / "tensorboard")).Reload(), dict[int, dict[str, float]]()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {}), "a step that was rolled back is still there"
            found[event.step][name] = event.value
    return found


def of_trackio(store: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    with sqlite3.connect(store / "winnow.db") as db:
        for step, name, row in db.execute("SELECT step, run_name, metrics FROM metrics ORDER BY id"):
            assert name == "mine"
            found[step] = json.loads(row)
    return found


def of_mlflow(run: Path) -> tuple[dict[int, dict[str, float]], Any]:
    from mlflow import MlflowClient

    client, identity = MlflowClient(), json.loads((run / "trackers.json").read_text())["mlflow"]
    known = client.get_run(identity)
    found: dict[int, dict[str, float]] = {}
    for name in known.data.metrics:
        for metric in client.get_metric_history(identity, name):
            found.setdefault(metric.step, {})[name.replace("_at_", "@")] = metric.value
    return found, known


def assert_same(found: dict[int, dict[str, float]], lines: list[dict[str, float]], rel: float = 1e-12) -> None:
    for line in lines:
        row, wanted = found[int(line["step"])], {k: v for k, v in line.items() if k != "step"}
        assert {k: v for k, v in row.items() if k in wanted} == pytest.approx(wanted, rel=rel)


@pytest.mark.slow
def test_a_run_and_its_resume(tiny_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=True)
    config = tiny_config | {"report_to": NAMES, "run_name": "mine", "max_steps": 3, "eval_steps": 3, "save_steps": 2}
    run = Path(config["output_dir"])

    pytest.importorskip("wandb").finish()  # what another test of this process left open

    class Dies:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    trainer = Trainer(config=config, reward_funcs=parity_reward)
    trainer.step()
    trainer.step()
    trainer.add_callback(Dies)
    with pytest.raises(ZeroDivisionError):
        trainer.step()  # is reported, and rolled back by the resume
    Trainer.resume(run, reward_funcs=parity_reward).train()

    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert_same(of_tensorboard(run), lines, rel=1e-6)  # float32
    rows, known = of_wandb(run)
    assert_same(rows, lines)
    assert (len(known["id"]), known["name"]) == (1, {"mine"})
    assert_same(of_trackio(tmp_path / "trackio"), lines)
    rows, of_run = of_mlflow(run)
    assert_same(rows, lines)
    assert (of_run.info.run_name, of_run.info.status) == ("mine", "FINISHED")
    assert of_run.data.params["num_generations"] == str(config["num_generations"])


def test_a_tracker_that_fails_does_not_end_the_run(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, *args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch.utils.tensorboard.SummaryWriter, "add_scalar", full)
    with pytest.warns(UserWarning, match=r"report_to: tensorboard failed and is off for the rest .*disk full") as said:
        Trainer(config=tiny_config | {"report_to": ["tensorboard"]}, reward_funcs=parity_reward).train()
    assert len([w for w in said if "report_to" in str(w.message)]) == 1


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """With what `failed` a tracker was closed that cannot log a metric `bad`."""
    known: list[bool] = []

    class Listens:
        def __init__(self, *args: Any) -> None: ...

        def log(self, metrics: dict[str, float], step: int) -> None:
            if "bad" in metrics:
                raise OSError("disk full")

        def close(self, *, failed: bool) -> None:
            known.append(failed)

    monkeypatch.setitem(TRACKERS, "tensorboard", Listens)
    return known


def test_a_tracker_that_is_dropped_is_closed(tmp_path: Path, closed: list[bool]) -> None:
    """Or its run would seem to go on."""
    opened = Trackers(tmp_path, {"report_to": ["tensorboard"]}, None)
    with pytest.warns(UserWarning, match="report_to: tensorboard failed and is off"):
        opened.log({"bad": 1.0}, 1)
    opened.close()
    assert closed == [True]


def test_an_interrupted_run_has_not_failed(tiny_config: dict[str, Any], closed: list[bool]) -> None:
    trainer = Trainer(config=tiny_config | {"report_to": ["tensorboard"]}, reward_funcs=parity_reward)
    trainer.step()
    trainer.stop()
    with pytest.raises(KeyboardInterrupt, match="saved at step"):
        trainer.train()
    with suppress(KeyboardInterrupt), Trainer.resume(trainer.run_dir, reward_funcs=parity_reward) as trainer:
        trainer.step()
        raise KeyboardInterrupt
    assert closed == [False, False]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("eval/pass@1", "eval/pass_at_1"),
        ("rewards/<lambda>/mean", "rewards/_lambda_/mean"),
        ("acc>0.5: a-b", "acc_0.5: a-b"),
        ("/a//b/../c/", "a/c"),
    ],
)
def test_mlflow_takes_every_name(name: str, taken: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    assert trackers.mlflow_name(name) == taken
    validation._validate_metric_name(taken)


def test_a_tracker_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://")
    settings = as_saved(validate({"model": "m", "env": "countdown", "report_to": ["mlflow"]}))
    with pytest.raises(ConfigError, match="report_to: mlflow could not be opened: "):
        Trackers(tmp_path, settings, None)


def test_a_missing_tracker_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"report_to: trackio is not installed; pip install .*\[trackio\]'"):
        check_trackers(["trackio"])
