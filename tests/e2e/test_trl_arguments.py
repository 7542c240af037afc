"""Arguments of TRL's trainer: each means what it says there, or is answered with what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.run.inputs import config_from

from ..parity import parity_reward

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")


def grpo(tmp_path: Path, **more: Any) -> Any:
    return trl.GRPOConfig(**{"output_dir": str(tmp_path / "run"), "use_cpu": True} | more)


def values(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return dict(config_from(None, {"args": grpo(tmp_path, **more)}))  # type: ignore[arg-type]


def test_a_config_of_trl_trains(tiny_model: Path, tmp_path: Path) -> None:
    args = grpo(tmp_path, max_steps=1, bf16=False, max_completion_length=8, max_grad_norm=0.0, report_to="none")
    rows = [{"prompt": f"numbers 3 5 {i} target 16 :"} for i in range(8)]
    trainer = Trainer(model=str(tiny_model), args=args, train_dataset=rows, reward_funcs=[parity_reward])
    c = trainer.config
    assert (c.max_steps, c.max_completion_length, c.dtype, c.device) == (1, 8, "float32", "cpu")
    assert (c.seed, c.lr_scheduler_type, c.prompts_per_step, c.max_grad_norm) == (42, "linear", 1, None)
    assert trainer.train()["step"] == 1


def test_fields_that_were_changed(tmp_path: Path) -> None:
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4}
    kept = {"learning_rate": 1e-4, "loss_type": "grpo", "beta": 0.01, "temperature": 0.9, "logging_steps": 5}
    found = values(tmp_path, scale_rewards="none", eval_strategy="steps", eval_steps=2, **batch, **kept)
    assert found["prompts_per_step"] == 4
    assert (found["advantage"], found["eval_steps"], found["num_train_epochs"]) == ("dr_grpo", 2, 3.0)
    assert {key: found[key] for key in ("learning_rate", "loss_type", "beta", "temperature")} == {
        key: kept[key] for key in ("learning_rate", "loss_type", "beta", "temperature")
    }


def test_fields_without_a_certain_counterpart_are_all_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        values(tmp_path, delta=0.5, save_strategy="no", steps_per_generation=4, scale_rewards="batch")
    lines = str(refused.value).splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "args: delta",
        "args: generation_batch_size",
        "args: save_strategy",
        "args: scale_rewards",
        "args: steps_per_generation",
    ]
    assert all(": here " in line for line in lines)


def test_adapters(tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    found = config_from({"max_steps": 3}, {"peft_config": lora})
    section = {"r": 4, "alpha": 16, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    assert found == {"max_steps": 3, "lora": section}
    assert config_from({"max_steps": 3}, {"peft_config": None}) == {"max_steps": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_config": lambda: peft.LoraConfig(r=4)}, "name them, e.g. LoraConfig\\(target_modules='all-linear'\\)"),
        (
            {"peft_config": lambda: peft.LoraConfig(target_modules="all-linear", use_rslora=True)},
            "peft_config: use_rslora=True",
        ),
        ({"peft_config": lambda: peft.IA3Config()}, "only a peft.LoraConfig"),
        ({"tools": lambda: [len]}, "no argument 'tools'. Here use `env"),
        ({"optimizers": lambda: (1, None)}, "no argument 'optimizers'. Here use `optim`"),
        ({"max_steps": lambda: 3}, r"write Trainer\(config=\{'max_steps'"),
        ({"config": lambda: 3}, "config: expected a RunConfig, a dict or a YAML file, not a int"),
        ({"config": dict, "args": dict}, "give one of them"),
    ],
)
def test_answers(given: dict[str, Any], message: str) -> None:
    made = {name: value() for name, value in given.items()}
    with pytest.raises(ConfigError, match=message):
        config_from(made.pop("config", None), made)


def test_compiling_sets_its_backend(tmp_path: Path) -> None:
    assert config_from(grpo(tmp_path, torch_compile=True), {})["torch_compile"] is True


def test_what_means_nothing_is_accepted_and_what_nobody_knows_is_not() -> None:
    nothing = {"tools": None, "optimizers": (None, None), "reward_processing_classes": None}
    assert config_from(None, nothing) == {}
    with pytest.raises(TypeError, match=r"no argument 'modle'\. Did you mean 'model'"):
        config_from(None, {"modle": None})


@pytest.mark.parametrize("env", [parity_reward, [parity_reward]])
def test_rewards_in_the_place_where_trl_has_them(tiny_model: Path, env: Any) -> None:
    with pytest.raises(ConfigError, match="give them as Trainer\\(reward_funcs"):
        Trainer(str(tiny_model), env)


def test_resume_from_checkpoint(tiny_config: dict[str, Any]) -> None:
    run = Path(tiny_config["output_dir"])
    options = {"eval_steps": None, "max_steps": 1}
    trainer = Trainer(config=tiny_config | options, reward_funcs=parity_reward)
    with pytest.raises(ConfigError, match=r"Trainer\.resume\('elsewhere', \.\.\.\)"):
        trainer.train(resume_from_checkpoint="elsewhere/checkpoints/step-000002")
    with pytest.raises(ConfigError, match=rf"Trainer\.resume\('{run}', \.\.\.\)"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.train(resume_from_checkpoint=None)["step"] == 1
    for checkpoint in (True, run / "checkpoints" / "step-000002"):
        step = 2 if checkpoint is True else 3
        again = Trainer.resume(run, {"max_steps": step}, reward_funcs=parity_reward)
        assert again.train(resume_from_checkpoint=checkpoint)["step"] == step
    later = Trainer.resume(run, {"max_steps": 4}, reward_funcs=parity_reward)
    with later, pytest.raises(ConfigError, match="step-000001 is not the newest, which is step-000003"):
        later.train(resume_from_checkpoint=run / "checkpoints" / "step-000001")
    with pytest.raises(ConfigError, match="a resumed run keeps its configuration"):
        Trainer.resume(run, args=grpo(run), reward_funcs=parity_reward)
    with pytest.raises(ConfigError, match="overrides: a dict of the keys to change, not GRPOConfig"):
        Trainer.resume(run, grpo(run), reward_funcs=parity_reward)
