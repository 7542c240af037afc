"""Callbacks of transformers and TRL, and the attributes of TRL's trainers: they work, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback

from tests.parity import parity_reward
from winnow import ConfigError, Trainer, TrainerCallback
from winnow.config import validate
from winnow.run import build
from winnow.run.callbacks import Callbacks

from ..builders.runs import metrics_of

EARLY = {"metric_for_best_model": "eval_reward", "eval_steps": 1}


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "eval_greedy": False}


@pytest.fixture
def quiet_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=True)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_trackers")
def test_callbacks_of_transformers_work(config: dict[str, Any]) -> None:
    rich = pytest.importorskip("trl.trainer.callbacks").RichProgressCallback
    kinds = (transformers.DefaultFlowCallback, transformers.ProgressCallback, transformers.PrinterCallback)
    reporters = (TensorBoardCallback, WandbCallback, TrackioCallback, MLflowCallback, rich)
    trainer = Trainer(config=config, reward_funcs=parity_reward, callbacks=[*kinds, *reporters])
    assert trainer.train()["step"] == 2
    assert [row["step"] for row in metrics_of(trainer.run_dir)] == [0, 1, 2], "one evaluation a step"
    assert [type(callback) for callback in trainer.callback_handler.callbacks] == [*kinds, *reporters]


def test_what_reaches_tensorboards_callback(config: dict[str, Any], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "events"))
    Trainer(config=config, reward_funcs=parity_reward, callbacks=[TensorBoardCallback(writer)]).train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    names = events.Tags()["scalars"]
    assert not [name for name in names if "eval/eval" in name or "train/eval" in name]
    rows = metrics_of(Path(config["output_dir"]))
    assert [e.value for e in events.Scalars("eval/reward")] == pytest.approx([row["eval/avg@n"] for row in rows])
    assert [e.value for e in events.Scalars("train/reward")] == pytest.approx([row["reward"] for row in rows[1:]])


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(
    ("values", "greater", "stops"),
    [
        ((0.5, 0.6, 0.7, 0.8), True, 3),
        ((0.5, 0.6, 0.6, 0.6), True, 3),
        ((0.5, 0.4, 0.4, 0.9), True, 2),
        ((0.5, 0.4, 0.3, 0.2), False, 3),
        ((0.5, 0.5, 0.6, 0.2), False, 2),
    ],
)
def test_early_stopping(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, values: tuple[float, ...], greater: bool, stops: int
) -> None:
    """Two evaluations without a better one end the run; the first of all is that before the first step."""
    given, evaluate = iter(values), build.evaluate

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        found = evaluate(*args, **kwargs)
        found.metrics["avg@n"] = next(given)
        return found

    monkeypatch.setattr(build, "evaluate", evaluated)
    config |= EARLY | {"max_steps": 3, "greater_is_better": greater}
    trainer = Trainer(config=config, reward_funcs=parity_reward, callbacks=[transformers.EarlyStoppingCallback(2)])
    trainer.train()
    assert trainer.state.global_step == stops
    best = (max if greater else min)(values[: stops + 1])
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (best, values.index(best))


def test_a_resume_remembers_the_best_evaluation(config: dict[str, Any]) -> None:
    config |= EARLY
    with Trainer(config=config, reward_funcs=parity_reward) as trainer:
        trainer.step()
    before = trainer.state
    again = Trainer.resume(config["output_dir"], reward_funcs=parity_reward)
    again.step()
    assert again.state.log_history[:2] == before.log_history
    assert [row["step"] for row in again.state.log_history] == [0, 1, 2]
    rewards = [row["eval_reward"] for row in again.state.log_history]
    assert again.state.best_metric == max(rewards)
    assert again.state.best_global_step == rewards.index(max(rewards))
    again.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_steps": 1}, "EarlyStoppingCallback needs metric_for_best_model"),
        ({}, "EarlyStoppingCallback needs eval_steps"),
    ],
)
def test_early_stopping_needs_a_metric(settings: dict[str, Any], message: str) -> None:
    class Mine(transformers.EarlyStoppingCallback):
        pass

    with pytest.raises(ConfigError, match=message):
        Callbacks([Mine()], validate({"model": "m", "env": "countdown"} | settings), 4)


def test_an_unknown_metric_is_refused_before_the_first_step(config: dict[str, Any]) -> None:
    trainer = Trainer(config=config | {"metric_for_best_model": "eval_rewrad"}, reward_funcs=parity_reward)
    with pytest.raises(
        ConfigError, match=r"metric_for_best_model: the evaluation has no eval_rewrad; it has eval_avg@n"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("name", "variable", "remedy"),
    [
        ("SyncRefModelCallback", None, "sync_ref_model: true"),
        ("ClearMLCallback", None, "on_log of your own"),
        ("WandbCallback", "WANDB_LOG_MODEL", r"WANDB_LOG_MODEL=checkpoint\)"),
        ("MLflowCallback", "HF_MLFLOW_LOG_ARTIFACTS", r"HF_MLFLOW_LOG_ARTIFACTS=checkpoint\)"),
    ],
)
def test_callbacks_that_need_transformers_trainer_are_refused(
    name: str, variable: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = type(name, (transformers.TrainerCallback,), {"__module__": "transformers.integrations"})
    config = validate({"model": "m", "env": "countdown"})
    if variable is not None:
        Callbacks([theirs], config, 4)
        monkeypatch.setenv(variable, "checkpoint")
    with pytest.raises(ConfigError, match=f"callbacks: {name} .*{remedy}"):
        Callbacks([type("Mine", (theirs,), {})], config, 4)


def test_an_evaluation_asked_for_at_the_end_of_a_step_is_of_that_step(config: dict[str, Any]) -> None:
    config |= {"eval_steps": None, "save_steps": 100}
    heard: list[tuple[int, float]] = []

    class Asks:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = True

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            heard.append((state.global_step, metrics["eval_reward"]))

    Trainer(config=config, reward_funcs=parity_reward, callbacks=[Asks]).train()
    assert [step for step, _ in heard] == [1, 2]
    rows = [row for row in metrics_of(Path(config["output_dir"])) if "eval/avg@n" in row]
    assert [(row["step"], row["eval/avg@n"]) for row in rows] == heard


def test_an_epoch_cannot_be_stopped(config: dict[str, Any]) -> None:
    class Epoch:
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = True

    with pytest.raises(ConfigError, match="Epoch set should_epoch_stop"):
        Trainer(config=config, reward_funcs=parity_reward, callbacks=[Epoch]).train()


def test_arguments_are_the_configuration_under_both_names(config: dict[str, Any]) -> None:
    trainer = Trainer(config=config, reward_funcs=parity_reward)
    args = trainer.args
    assert args.output_dir == str(trainer.run_dir)
    assert args.num_generations == config["num_generations"]
    assert args.per_device_train_batch_size == config["prompts_per_step"] * config["num_generations"]
    assert args.eval_strategy == transformers.trainer_utils.IntervalStrategy.STEPS
    assert (args.load_best_model_at_end, args.eval_delay, args.lr_scheduler_type) == (False, 0, "constant")
    assert json.loads(args.to_json_string())["max_steps"] == 2
    with pytest.raises(AttributeError, match="neither Winnow nor transformers has a setting 'beam_width'"):
        _ = args.beam_width
    with pytest.raises(AttributeError, match=r"args\.learning_rate: a run keeps the configuration"):
        args.learning_rate = 1.0
    trainer.close()


def test_after_training(config: dict[str, Any], tmp_path: Path) -> None:
    class Saves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.save_model()

    trainer = Trainer(config=config, reward_funcs=parity_reward, callbacks=[Saves])
    with pytest.warns(UserWarning, match="save_model: the model is in .*model-at-step-1"):
        last = trainer.train()
    run = trainer.run_dir
    before = (run / "config.json").read_text()
    with pytest.warns(UserWarning, match=f"save_model: the model is in {run / 'model'}"):
        trainer.save_model(trainer.args.output_dir)
    assert (run / "config.json").read_text() == before, "the run's configuration, not the model's"
    assert (run / "model-at-step-1" / "model.safetensors").exists()
    trainer.save_model(tmp_path / "copy")
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert all(map(lambda a, b: a.equal(b), copy.state_dict().values(), trainer.model.state_dict().values()))
    assert trainer.processing_class is trainer.tokenizer
    assert trainer.evaluate()["eval/avg@n"] == last["eval/avg@n"], "the same policy, seeds and prompts"
    assert [row["step"] for row in trainer.state.log_history] == [0, 1, 2, 2]
    assert trainer.pop_callback(Saves).__class__ is Saves
    assert trainer.callback_handler.callbacks == []
