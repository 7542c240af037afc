"""Loops of one's own around `Trainer.step()`, and callbacks: the same run as `train()`, ended at any place."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.parity import parity_reward
from winnow import ConfigError, Trainer, TrainerCallback, TrainerControl, TrainerState
from winnow.record.records import RunDirectoryError

from ..builders.runs import assert_clean, fingerprint, metrics_of


class Heard(TrainerCallback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.groups = 0
        self.logs: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []

    def _note(self, event: str, state: TrainerState) -> None:
        self.events.append((event, state.global_step))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert kwargs["model"] is not None
        assert kwargs["processing_class"].is_fast
        self._note("train begins", state)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._note("begins", state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.groups += len(kwargs["groups"])
        self._note("ends", state)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert state.log_history[-1] == kwargs["logs"]
        self.logs.append(kwargs["logs"])

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.evaluations.append(kwargs["metrics"])
        self._note("evaluated", state)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._note("saved", state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._note("train ends", state)


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"max_steps": 3, "save_steps": 2, "eval_steps": 3}


def other(config: dict[str, Any], name: str) -> dict[str, Any]:
    return config | {"output_dir": str(Path(config["output_dir"]).parent / name)}


def test_step_by_step_is_the_run_of_train(config: dict[str, Any]) -> None:
    whole = Trainer(config=config, reward_funcs=parity_reward).train()
    mine = other(config, "mine")
    with Trainer(config=mine, reward_funcs=parity_reward) as trainer:
        rows = [trainer.step() for _ in range(3)]
        with pytest.raises(ConfigError, match=r"max_steps: the run has made its 3 steps; call finish\(\)"):
            trainer.step()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["eval/pass@1"] == whole["eval/pass@1"]
    assert fingerprint(Path(mine["output_dir"])) == fingerprint(Path(config["output_dir"]))


def test_a_loop_left_early_is_saved_and_goes_on(config: dict[str, Any]) -> None:
    Trainer(config=config, reward_funcs=parity_reward).train()
    mine = other(config, "mine")
    with Trainer(config=mine, reward_funcs=parity_reward) as trainer:
        trainer.step()
    run = Path(mine["output_dir"])
    assert not (run / "model").exists()
    with pytest.raises(RunDirectoryError, match="a Trainer runs once"):
        trainer.step()
    with contextlib.suppress(ZeroDivisionError), Trainer.resume(run, reward_funcs=parity_reward) as trainer:
        assert trainer.step()["step"] == 2
        raise ZeroDivisionError  # between two steps: nothing is lost
    with Trainer.resume(run, reward_funcs=parity_reward) as trainer:
        assert trainer.step()["step"] == trainer.state.global_step == 3
    assert (run / "model" / "config.json").exists()
    assert_clean(run)
    assert fingerprint(run) == fingerprint(Path(config["output_dir"]))


def test_ending_early_with_a_model(config: dict[str, Any], tmp_path: Path) -> None:
    trainer = Trainer(config=config, reward_funcs=parity_reward)
    before = trainer.evaluate()
    trainer.step()
    trainer.save_model(tmp_path / "best")
    with pytest.warns(UserWarning, match="save_model: the model is in .*model-at-step-1"):
        trainer.save_model(trainer.run_dir / "model" / "best")
    assert trainer.finish()["step"] == 1
    trainer.close()  # has nothing to do any more
    assert 0 <= before["eval/pass@1"] <= 1
    for saved in (tmp_path / "best", Path(config["output_dir"]) / "model"):
        transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert_clean(Path(config["output_dir"]))
    again = Trainer.resume(config["output_dir"], reward_funcs=parity_reward)
    assert again.train()["step"] == 3


@pytest.mark.parametrize("save_steps", [1, 100])
def test_evaluations_of_a_loop_are_among_the_metrics(config: dict[str, Any], save_steps: int) -> None:
    """Also those of a step that had been saved."""
    config |= {"eval_steps": None, "save_steps": save_steps}
    with Trainer(config=config, reward_funcs=parity_reward) as trainer:
        returned = [trainer.evaluate()]
        trainer.step()
        returned.append(trainer.evaluate())
    rows = [row for row in metrics_of(Path(config["output_dir"])) if "eval/pass@1" in row]
    assert [(row["step"], row["eval/pass@1"]) for row in rows] == [(n, returned[n]["eval/pass@1"]) for n in (0, 1)]
    with Trainer.resume(config["output_dir"], reward_funcs=parity_reward) as trainer:
        trainer.step()
        assert sum("eval/pass@1" in row for row in trainer.state.log_history) == 2


def test_evaluation_needs_held_out_prompts(config: dict[str, Any]) -> None:
    rows = [{"prompt": f"{n} 2 3"} for n in range(12)]
    mine = {k: v for k, v in config.items() if k != "env"} | {"eval_steps": None}
    trainer = Trainer(config=mine, train_dataset=rows, reward_funcs=parity_reward)
    with pytest.raises(ConfigError, match="eval_dataset: no held-out prompts"):
        trainer.evaluate()


def test_what_callbacks_hear(config: dict[str, Any]) -> None:
    heard = Heard()
    Trainer(config=config, reward_funcs=parity_reward, callbacks=[heard]).train()
    assert heard.events == [
        *(("train begins", 0), ("evaluated", 0), ("begins", 0), ("ends", 1), ("begins", 1), ("ends", 2)),
        *(("saved", 2), ("begins", 2), ("ends", 3), ("evaluated", 3), ("saved", 3), ("train ends", 3)),
    ]
    assert heard.groups >= 3 * config["prompts_per_step"]
    assert [row["step"] for row in heard.logs] == [0, 1, 2, 3]
    assert all("eval/pass@1" in metrics and "reward" not in metrics for metrics in heard.evaluations)


def test_a_run_with_callbacks_is_the_same_run(config: dict[str, Any]) -> None:
    Trainer(config=config, reward_funcs=parity_reward).train()
    Trainer(config=other(config, "heard"), reward_funcs=parity_reward, callbacks=[Heard]).train()
    assert fingerprint(Path(other(config, "heard")["output_dir"])) == fingerprint(Path(config["output_dir"]))


def test_a_resume_tells_callbacks_where_it_is(config: dict[str, Any]) -> None:
    with Trainer(config=config, reward_funcs=parity_reward) as trainer:
        trainer.step()
    heard = Heard()
    trainer = Trainer.resume(config["output_dir"], reward_funcs=parity_reward, callbacks=[heard])
    trainer.step()
    assert heard.events[:2] == [("train begins", 1), ("begins", 1)]
    assert trainer.state.epoch == pytest.approx(2 * config["prompts_per_step"] / len(trainer.task.train))
    trainer.close()


class Asks(transformers.TrainerCallback):
    """A callback of transformers, which asks for everything a control can have."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_evaluate = state.global_step == 0
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 2


def test_what_callbacks_ask_for(config: dict[str, Any]) -> None:
    heard, asks = Heard(), Asks()
    config |= {"eval_steps": None, "save_steps": 100, "save_total_limit": 5}
    last = Trainer(config=config, reward_funcs=parity_reward, callbacks=[asks, heard]).train()
    told = [event for event in heard.events if event[0] in ("evaluated", "saved", "train ends")]
    assert told == [("evaluated", 1), ("saved", 1), ("saved", 2), ("train ends", 2)]
    assert last["step"] == 2
    assert (Path(config["output_dir"]) / "model" / "config.json").exists()
    assert_clean(Path(config["output_dir"]))


def test_callbacks_that_cannot_be_heard(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="callbacks: int has none of the methods on_train_begin, on_step_begin"):
        Trainer(config=config, reward_funcs=parity_reward, callbacks=[3])

    class Epochs(transformers.TrainerCallback):
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None: ...

    trainer = Trainer(config=config, reward_funcs=parity_reward)
    with pytest.warns(UserWarning, match="callbacks: Epochs.on_epoch_end is never called"):
        trainer.add_callback(Epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.add_callback(Asks)
    trainer.remove_callback(Asks)
    assert trainer.train()["step"] == 3  # nobody asked for the end any more
