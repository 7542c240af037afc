"""A task or rewards that were objects: later uses of the run refuse others, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from winnow import Trainer, TrainerCallback
from winnow.base.errors import ConfigError
from winnow.engine.loading import CPU, load_causal_lm, load_tokenizer
from winnow.env.dataset import DatasetConfig
from winnow.record.records import read_config
from winnow.run.standalone import evaluate_model
from winnow.study.pass_rates import profile_model
from winnow.tasks.countdown import CountdownConfig

from ..builders.hostile_state import seal
from ..parity import parity_reward


class Dies(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise OSError("no space left on device")


def test_a_run_that_died_before_its_first_checkpoint(tiny_config: dict[str, Any]) -> None:
    run = tiny_config["output_dir"]
    with pytest.raises(OSError, match="no space left"):
        Trainer(config=tiny_config, reward_funcs=parity_reward, callbacks=[Dies()]).train()
    with pytest.raises(ConfigError, match="the reward functions is not the one this run was saved with"):
        Trainer.resume(run).train()
    with pytest.raises(ConfigError, match="the task is not the one"):
        Trainer.resume(run, env=CountdownConfig(seed=5).build(), reward_funcs=parity_reward).train()
    assert Trainer.resume(run, reward_funcs=parity_reward).train()["step"] == tiny_config["max_steps"]


def test_evaluations_of_a_run_with_other_rewards_or_another_task(tiny_config: dict[str, Any]) -> None:
    run = tiny_config["output_dir"]
    of_file = {"reward_funcs": [f"{__file__}:never_asked"]}
    task = CountdownConfig(train_size=24, test_size=3, seed=9).build()
    Trainer(config=tiny_config | of_file, reward_funcs=parity_reward, env=task).train()
    assert read_config(Path(run))["reward_funcs"] is None
    for use in (evaluate_model, profile_model):
        with pytest.raises(ConfigError, match=r"env: the configuration of the run does not make its task again"):
            use(run, {})
    env = {"name": "countdown", "train_size": 24, "test_size": 3, "seed": 9}
    assert evaluate_model(run, {"env": env})["prompts"] == 3


def test_an_evaluation_with_other_rewards(tiny_config: dict[str, Any]) -> None:
    run = tiny_config["output_dir"]
    Trainer(config=tiny_config, reward_funcs=parity_reward).train()
    with pytest.raises(ConfigError, match="reward_funcs: the configuration of the run does not make its reward functi"):
        evaluate_model(run, {})
    named = {"reward_funcs": ["tests.parity:parity_reward"]}
    assert evaluate_model(run, named)["prompts"] == 4


def test_a_task_and_rows(tiny_config: dict[str, Any]) -> None:
    rows = [{"prompt": f"{i} + 1 ="} for i in range(4)]
    task = DatasetConfig("rows", system_prompt="Be kind.").with_rows([{"prompt": "1 + 1 ="}])
    with pytest.raises(ConfigError, match="train_dataset: the task given as env brings its own prompts"):
        Trainer(config=tiny_config, env=task, train_dataset=rows, reward_funcs=parity_reward)


def test_what_an_object_has_frozen_stays_frozen(tiny_config: dict[str, Any]) -> None:
    """Also in a resume by name."""
    model, tokenizer = load_causal_lm(tiny_config["model"], CPU), load_tokenizer(tiny_config["model"])
    model.get_input_embeddings().requires_grad_(False)
    before = model.get_input_embeddings().weight.clone()
    objects = {"model": model, "processing_class": tokenizer}
    config = tiny_config | {"max_steps": 2, "reward_funcs": ["tests.parity:parity_reward"]}
    Trainer(config=config, **objects).train()
    run = Path(tiny_config["output_dir"])
    Trainer.resume(run, {"max_steps": 3}, **objects).train()
    Trainer.resume(run, {"max_steps": 4}).train()
    after = load_causal_lm(run / "model", CPU)
    assert torch.equal(after.get_input_embeddings().weight, before)
    assert not torch.equal(after.model.norm.weight, load_causal_lm(tiny_config["model"], CPU).model.norm.weight)
    with pytest.raises(ConfigError, match=r"model: model\.embed_tokens\.weight is frozen in the run alone"):
        Trainer.resume(run, {"max_steps": 5}, model=model.requires_grad_(True), processing_class=tokenizer)
    for file in run.glob("checkpoints/*/frozen.json"):  # as of an older version
        file.unlink()
        seal(file.parent)
    model.get_input_embeddings().requires_grad_(False)
    again = Trainer.resume(run, {"max_steps": 5}, **objects)
    assert not again.model.get_input_embeddings().weight.requires_grad
    again.close()


def test_a_resume_freezes_nothing_that_the_run_trained(tiny_config: dict[str, Any]) -> None:
    model, tokenizer = load_causal_lm(tiny_config["model"], CPU), load_tokenizer(tiny_config["model"])
    objects, run = {"model": model, "processing_class": tokenizer}, tiny_config["output_dir"]
    config = tiny_config | {"max_steps": 1, "reward_funcs": ["tests.parity:parity_reward"], "optim": "sgd"}
    Trainer(config=config, **objects).train()
    model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(ConfigError, match=r"model: model\.embed_tokens\.weight is frozen in the given model alone"):
        Trainer.resume(run, {"max_steps": 2}, **objects)
