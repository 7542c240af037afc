"""Runs of trackers that the user opened before training: used with a step metric of their own, and left open."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parity import parity_reward
from winnow import Trainer, TrainerCallback

from ..builders.runs import metrics_of
from ..builders.wandb_files import frames

STEP = "train/global_step"


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"max_steps": 2, "save_steps": 1, "eval_steps": None}


class Dies(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    import wandb

    wandb.finish()  # what another test of this process left open
    yield wandb
    wandb.finish()


def stored(folder: Path, run_id: str) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, Any], int | None]:
    """Rows of a finished W&B run, its step metric of each metric, its configuration and exit code."""
    from wandb.proto import wandb_internal_pb2 as pb

    for _ in range(600):  # W&B's process may create and write the file after `finish` has returned
        files = sorted(folder.rglob(f"run-{run_id}.wandb"), key=lambda file: file.parent.name)  # by date
        whole = [[pb.Record.FromString(frame) for frame in frames(file)] for file in files]
        if whole and all(any(record.HasField("exit") for record in records) for records in whole):
            break
        time.sleep(0.1)
    rows: list[dict[str, Any]] = []
    steps: dict[str, str] = {}
    config: dict[str, Any] = {}
    code = None
    for record in (record for records in whole for record in records):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
        elif kind == "metric":
            steps[record.metric.name] = record.metric.step_metric
        elif kind == "exit":
            code = record.exit.exit_code
        changed = record.config if kind == "config" else record.run.config
        config |= {item.key: json.loads(item.value_json) for item in changed.update}
    return rows, steps, config, code


def rewards(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row[STEP], row["reward"]) for row in rows if "reward" in row]


def logs_of(run: Path) -> list[tuple[int, float]]:
    return [(int(row["step"]), row["reward"]) for row in metrics_of(run)]


@pytest.mark.slow
def test_wandb(config: dict[str, Any], tmp_path: Path, wandb: Any) -> None:
    """Also with more rows of the user's than steps, a failure, a resume, and logs within a run of Winnow's own."""
    mine = wandb.init(project="mine", dir=str(tmp_path), config={"learning_rate": 7, "note": "sweep"})
    for i in range(5):
        wandb.log({"before": i})
    run = Path(config["output_dir"])
    trainer = Trainer(config=config | {"report_to": ["wandb"]}, reward_funcs=parity_reward, callbacks=[Dies])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert wandb.run is mine, "left open by a failure, too"
    wandb.log({"between": 1})
    Trainer.resume(run, reward_funcs=parity_reward).train()
    assert wandb.run is mine
    wandb.log({"after": 1})
    wandb.finish()
    rows, steps, known, code = stored(tmp_path, mine.id)
    assert rewards(rows) == [(step, pytest.approx(reward)) for step, reward in [logs_of(run)[i] for i in (0, 1, 1)]]
    assert [row["before"] for row in rows if "before" in row] == [0, 1, 2, 3, 4]
    assert [sum(name in row for row in rows) for name in ("between", "after")] == [1, 1]
    assert (steps["reward"], steps.get("before")) == (STEP, None)
    assert (known["learning_rate"], known["note"], known["num_generations"]) == (7, "sweep", config["num_generations"])
    assert code == 0
    assert not list(run.rglob("*.wandb")), "no run besides the user's"


@pytest.mark.slow
def test_a_resume_continues_the_users_wandb_run(
    config: dict[str, Any], tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its project, though nobody has opened it this time; then it is Winnow's to finish."""
    mine = wandb.init(project="mine", dir=str(tmp_path))
    with Trainer(config=config | {"report_to": ["wandb"]}, reward_funcs=parity_reward) as trainer:
        trainer.step()
    wandb.finish()
    seen: dict[str, Any] = {}
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: seen.update(given) or init(**given))
    Trainer.resume(config["output_dir"], reward_funcs=parity_reward).train()
    assert (seen["project"], seen["id"], seen["resume"]) == ("mine", mine.id, "allow")
    assert wandb.run is None
    run = Path(config["output_dir"])
    assert rewards([*stored(tmp_path, mine.id)[0]])[-1] == (2, pytest.approx(logs_of(run)[1][1]))


@pytest.mark.slow
def test_wandb_runs_of_two_trainers_stay_apart(config: dict[str, Any], tmp_path: Path, wandb: Any) -> None:
    """Winnow's own runs; the user logs to the first twice a step, and the second fails."""
    config |= {"report_to": ["wandb"], "max_steps": 3}
    runs = [tmp_path / "a", tmp_path / "b"]
    first, second = (Trainer(config=config | {"output_dir": str(run)}, reward_funcs=parity_reward) for run in runs)
    second.add_callback(Dies)
    first.step()
    second.step()
    for _ in range(2):
        wandb.log({"mine": 1})
        wandb.log({"mine": 2})
        first.step()
    with pytest.raises(ZeroDivisionError):
        second.step()
    assert wandb.run is not None, "that of the first"
    first.finish()
    assert wandb.run is None
    ids = [json.loads((run / "trackers.json").read_text())["wandb"] for run in runs]
    found = [stored(tmp_path, one) for one in ids]
    for run, (rows, *_) in zip(runs, found, strict=True):
        assert rewards(rows) == [(step, pytest.approx(reward)) for step, reward in logs_of(run)]
    assert [code for *_, code in found] == [0, 1], "a run that failed says so"


def test_an_evaluation_is_logged(config: dict[str, Any], tmp_path: Path, wandb: Any) -> None:
    mine = wandb.init(project="mine", dir=str(tmp_path))
    config |= {"report_to": ["wandb", "tensorboard"], "max_steps": 1, "eval_greedy": False}
    trainer = Trainer(config=config, reward_funcs=parity_reward)
    found = [trainer.evaluate()["eval/avg@n"]]
    trainer.train()
    found.append(trainer.evaluate()["eval/avg@n"])
    wandb.finish()
    rows = stored(tmp_path, mine.id)[0]
    assert [(row[STEP], row["eval/avg@n"]) for row in rows if "eval/avg@n" in row] == [(0, found[0]), (1, found[1])]


def test_trackio(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=True)
    mine = trackio.init(project="mine", name="attempt", config={"learning_rate": 7}, embed=False)
    trackio.log({"before": 1})
    config |= {"report_to": ["trackio"]}
    with pytest.raises(ZeroDivisionError):
        Trainer(config=config, reward_funcs=parity_reward, callbacks=[Dies]).train()
    trackio.log({"between": 1})
    Trainer.resume(config["output_dir"], reward_funcs=parity_reward).train()
    assert trackio.context_vars.current_run.get() is mine
    trackio.log({"after": 1})
    trackio.finish()
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as db:
        rows = [json.loads(row) for (row,) in db.execute("SELECT metrics FROM metrics ORDER BY id")]
        known = [json.loads(row) for (row,) in db.execute("SELECT config FROM configs")][-1]
    run = Path(config["output_dir"])
    assert [row["reward"] for row in rows if "reward" in row] == pytest.approx([logs_of(run)[i][1] for i in (0, 1, 1)])
    assert [sum(name in row for row in rows) for name in ("before", "between", "after")] == [1, 1, 1]
    assert (known["learning_rate"], known["num_generations"]) == (7, config["num_generations"])
    assert not (tmp_path / "trackio" / "winnow.db").exists()

    runs = [tmp_path / "a", tmp_path / "b"]  # Winnow's own runs; the first stays open while the second begins
    first, second = (Trainer(config=config | {"output_dir": str(run)}, reward_funcs=parity_reward) for run in runs)
    first.step()
    second.train()
    first.step()
    first.close()
    assert trackio.context_vars.current_run.get() is None
    with sqlite3.connect(tmp_path / "trackio" / "winnow.db") as db:
        found = [*db.execute("SELECT run_name, step FROM metrics ORDER BY run_name, step")]
    assert found == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


@pytest.mark.slow
def test_mlflow(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    # Put back after the test: the experiment that is set would hold in this process for other tests' stores, too.
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
    mlflow.set_experiment("mine")
    mine = mlflow.start_run(run_name="attempt")
    mlflow.log_param("learning_rate", 7)
    config |= {"report_to": ["mlflow"]}
    with pytest.raises(ZeroDivisionError):
        Trainer(config=config, reward_funcs=parity_reward, callbacks=[Dies]).train()
    active = mlflow.active_run()
    assert active is not None
    assert active.info.run_id == mine.info.run_id
    Trainer.resume(config["output_dir"], reward_funcs=parity_reward).train()
    mlflow.log_metric("after", 1.0)
    client = mlflow.MlflowClient()
    assert client.get_run(mine.info.run_id).info.status == "RUNNING"
    mlflow.end_run()
    known = client.get_run(mine.info.run_id).data
    assert (known.params["learning_rate"], known.params["num_generations"]) == ("7", str(config["num_generations"]))
    history = {m.step: m.value for m in client.get_metric_history(mine.info.run_id, "reward")}
    assert history == pytest.approx(dict(logs_of(Path(config["output_dir"]))))
    assert client.get_experiment_by_name("winnow") is None

    failed = tmp_path / "failed"
    with pytest.raises(ZeroDivisionError):
        Trainer(config=config | {"output_dir": str(failed)}, reward_funcs=parity_reward, callbacks=[Dies]).train()
    identity = json.loads((failed / "trackers.json").read_text())["mlflow"]
    assert client.get_run(identity).info.status == "FAILED"
