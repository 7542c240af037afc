"""Keys of other trainers: each works here or is answered with what to write instead."""

from __future__ import annotations

import dataclasses
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml

from winnow.base.errors import ConfigError
from winnow.config import RunConfig, validate
from winnow.config.errors import load_hints, reward_hint
from winnow.env.rewards.rewarder import Rewarder

GOOD = {"model": "m", "env": "countdown"}
OURS = set(RunConfig.model_fields)


def answer(settings: dict[str, Any]) -> list[str]:
    """What is said of settings that do not work here, a line each."""
    with pytest.raises(ConfigError) as found:
        validate(GOOD | settings)
    return [line.removeprefix("config: ") for line in str(found.value).splitlines()]


def test_every_key_of_trl() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert len(theirs) > 150
    assert sorted(theirs - OURS - load_hints("flat").keys()) == []
    for key in theirs - OURS:
        (line,) = answer({key: {"a": 1} if key.endswith("kwargs") else 1})
        assert line.startswith(f"unknown key '{key}'. Here "), line


def test_answers_name_keys_that_exist() -> None:
    known = OURS | {"slots", "name", "path", "preset", "prompt_column", "r", "alpha"}
    methods = {"grpo", "rloo", "dr_grpo", "reinforce_pp", "remax", "plain", "mask", "m2po"}
    values = methods | {"local", "vllm", "ray", "server"}
    for said in {*load_hints("flat").values(), *load_hints("nested").values()}:
        for quoted in re.findall(r"`([^`]+)`", said):
            first = re.split(r"[:, ]", quoted)[0]
            fine = (
                first in known | values
                or quoted.startswith(("winnow ", "hf "))
                or "/" in quoted
                or first == "max_turns"
            )
            assert fine, said
    assert not load_hints("flat").keys() & OURS


DOCS = Path(__file__).parents[2] / "docs" / "trl.md"


def _table(heading: str) -> list[list[Any]]:
    """Four cells of each row of the table with this heading; what is quoted as YAML values."""
    lines = DOCS.read_text(encoding="utf-8").split(heading)[1].splitlines()[1:]
    rows = [line.removeprefix("|").split("|")[:4] for line in lines[: lines.index("")]]
    cells = [[cell.strip() for cell in row] for row in rows]
    return [[yaml.safe_load(cell.strip("`")) if cell.startswith("`") else None for cell in row] for row in cells]


def _default(field: Any) -> Any:
    """The default of a field of either class; empty lists and sections are None."""
    value = field.default
    if value is dataclasses.MISSING:
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
    return None if value in ([], {}) else value


def test_the_table_of_defaults_that_differ() -> None:
    """Exactly those of keys that both have, but for other words for nothing."""
    trl = pytest.importorskip("trl")
    theirs = {field.name: _default(field) for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {name: _default(field) for name, field in RunConfig.model_fields.items()}
    shown = {key: (a, b) for key, a, b, _ in _table("| key | TRL | Winnow | |\n")}
    differ = {key: (theirs[key], ours[key]) for key in theirs.keys() & ours if theirs[key] != ours[key]}
    assert (differ.pop("min_p"), differ.pop("report_to")) == ((None, 0.0), ("none", None))
    assert shown == differ
    for their_key, a, our_key, b in _table("| TRL | default | Winnow | default | |\n"):
        assert their_key is None or theirs[their_key] == a
        assert our_key is None or ours[our_key] == b
        assert their_key not in ours


VERL = {
    "data": {"train_files": "a.parquet", "max_response_length": 9, "prompt_key": "q", "train_batch_size": 8},
    "actor_rollout_ref": {
        "model": {"path": "m", "enable_gradient_checkpointing": True, "lora_rank": 8, "trust_remote_code": True},
        "actor": {
            "optim": {"lr": 1e-6, "lr_warmup_steps_ratio": 0.1, "weight_decay": 0.1},
            "ppo_mini_batch_size": 8,
            "ppo_micro_batch_size_per_gpu": 2,
            "clip_ratio_high": 0.28,
            "entropy_coeff": 0,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "loss_agg_mode": "token-mean",
            "fsdp_config": {"param_offload": True},
            "grad_clip": 1.0,
        },
        "rollout": {
            "n": 8,
            "name": "vllm",
            "temperature": 1,
            "tensor_model_parallel_size": 2,
            "gpu_memory_utilization": 0.6,
            "val_kwargs": {"n": 4},
            "multi_turn": {"enable": True},
        },
        "ref": {"fsdp_config": {"param_offload": True}},
    },
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "filter_groups": {"enable": True}},
    "custom_reward_function": {"path": "r.py", "name": "f"},
    "trainer": {
        "total_epochs": 1,
        "logger": ["console"],
        "project_name": "p",
        "save_freq": 1,
        "test_freq": 1,
        "nnodes": 1,
    },
    "critic": {"strategy": "fsdp"},
}
PRIME_RL = {
    "max_async_level": 2,
    "seq_len": 2048,
    "wandb": {"project": "p", "name": "n"},
    "ckpt": {"interval": 10},
    "trainer": {"optim": {"lr": 1e-6}, "model": {"ac": {"freq": 1}}, "loss": {"ratio_type": "token"}},
    "orchestrator": {
        "batch_size": 128,
        "rollouts_per_example": 8,
        "oversampling_factor": 2.0,
        "sampling": {"max_tokens": 128, "temperature": 1.0},
        "env": [{"id": "gsm8k"}],
        "buffer": {"easy_threshold": 0.9, "online_difficulty_filtering": True},
        "eval": {"interval": 10, "rollouts_per_example": 4},
    },
    "inference": {"parallel": {"tp": 2}, "server": {"port": 8000}},
}


@pytest.mark.parametrize("theirs", [VERL, PRIME_RL], ids=["verl", "prime-rl"])
def test_sections_of_other_trainers(theirs: dict[str, Any]) -> None:
    """Each leaf is named with its sections, and answered."""

    def leaves(value: Any) -> int:
        return sum(map(leaves, value.values())) if isinstance(value, dict) else 1

    lines = answer(theirs)
    assert len(lines) == leaves(theirs)
    assert [line for line in lines if "'. Here " not in line] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 1e-6}, "unknown key 'lr'. Here use `learning_rate`."),
        ({"deepspeed": "z3.json"}, "unknown key 'deepspeed'. Here use `learner: {name: fsdp, ranks: ...}` (Ray)."),
        (
            {"warmup_ratio": 0.1},
            "unknown key 'warmup_ratio'. Here use `warmup_steps`, as a share of all steps below 1.",
        ),
        (
            {"actor_rollout_ref": {"rollout": {"n": 8}}},
            "unknown key 'actor_rollout_ref.rollout.n'. Here use `num_generations`.",
        ),
        (
            {"shuffle_dataset": False},
            "unknown key 'shuffle_dataset'. Here use `selector: ordered` for the order",
        ),
        ({"data": {"shuffle": False}}, "unknown key 'data.shuffle'. Here use `selector: ordered` for the order"),
        ({"attn_implementation": "eager"}, "unknown key 'attn_implementation'. Here leave it out: attention is"),
        ({"load_in_4bit": True}, "unknown key 'load_in_4bit'. Here there is no counterpart: quantized weights"),
        ({"actor_rollout_ref": {}}, "unknown key 'actor_rollout_ref'."),
        ({"learning_rat": 1e-6}, "unknown key 'learning_rat'. Did you mean 'learning_rate'?"),
    ],
)
def test_what_is_said(settings: dict[str, Any], message: str) -> None:
    (line,) = answer(settings)
    assert line.startswith(message)


def test_every_default_of_trl() -> None:
    """Each default of a key that is here, too, works or is answered."""
    trl = pytest.importorskip("trl")
    refused = {}
    for field in dataclasses.fields(trl.GRPOConfig):
        if field.name in OURS:
            missing = field.default is dataclasses.MISSING
            value = field.default_factory() if missing else field.default  # type: ignore[misc]
            try:
                validate(GOOD | {field.name: value})
            except ConfigError as error:
                refused[field.name] = str(error)
    assert "Here use a number of steps, or `num_train_epochs`" in refused.pop("max_steps")
    assert "remove it or set push_to_hub: true" in refused.pop("hub_strategy")
    assert refused == {}


@pytest.mark.parametrize("owner", ["ScriptArguments", "ModelConfig", "DatasetMixtureConfig", "GRPOTrainer"])
def test_every_key_and_argument_of_trls_scripts(owner: str) -> None:
    trl = pytest.importorskip("trl")
    kind = getattr(trl, owner)
    is_data = dataclasses.is_dataclass(kind)
    theirs = {f.name for f in dataclasses.fields(kind)} if is_data else set(signature(kind.__init__).parameters)
    theirs -= OURS | {"self", "args"}
    assert sorted(theirs - load_hints("flat").keys()) == []


def test_a_usual_yaml_of_trl() -> None:
    """Each line works, or is answered with what to write."""
    theirs = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "dataset_config": "default",
        "reward_funcs": ["think_format_reward"],
        "system_prompt": "Be brief.",
        "output_dir": "out",
        "overwrite_output_dir": True,
        "max_steps": -1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "learning_rate": "1.0e-6",
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "max_completion_length": 512,
        "num_generations": 8,
        "use_vllm": True,
        "vllm_device": "auto",
        "bf16": True,
        "logging_steps": 1,
        "log_completions": True,
        "report_to": "none",
        "save_strategy": "steps",
        "save_total_limit": None,
        "top_k": -1,
        "min_p": None,
        "max_grad_norm": 0,
        "chat_template_kwargs": None,
        "tools": ["t.py:f"],
        "environment_factory": "t.py:Env",
    }
    lines = answer(theirs)
    assert [line for line in lines if "'. Here " not in line] == []
    answered = {line.partition("'")[2].partition("'")[0] for line in lines}
    assert answered == set(theirs) - OURS
    config = validate(GOOD | {key: value for key, value in theirs.items() if key in OURS})
    assert (config.report_to, config.log_completions, config.save_total_limit) == ([], 8, None)
    assert (config.top_k, config.min_p, config.max_grad_norm, config.chat_template_kwargs) == (0, 0.0, None, {})
    assert config.num_train_epochs == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "cispo"}, "Here use `policy_loss: {name: cispo, epsilon_high: 5}` with `loss_type: dapo`"),
        ({"loss_type": "bnpo"}, "Here use `loss_type: dapo`"),
        ({"report_to": "all"}, "Here name the trackers"),
        ({"report_to": ["all"]}, "Here name the trackers"),
        ({"save_steps": 0.1}, "Here use a number of steps"),
        ({"resume": True}, "Here use `warn` or `strict`, for a resume"),
        ({"max_steps": -1}, "Here use a number of steps, or `num_train_epochs`"),
        ({"optim": "paged_adamw_8bit"}, "Here use `optim: adamw_torch_8bit`"),
        ({"max_completion_length": None}, "Here use a number of tokens"),
    ],
)
def test_values_that_are_answered(settings: dict[str, Any], message: str) -> None:
    (line,) = answer(settings)
    assert message in line


def test_a_tracker_alone_is_a_list() -> None:
    assert validate(GOOD | {"report_to": "tensorboard"}).report_to == ["tensorboard"]
    assert validate(GOOD | {"log_completions": False}).log_completions == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("think_format_reward", "Did you mean 'trl.rewards:think_format_reward'?"),
        ("trl.rewards.think_format_reward", "Did you mean 'trl.rewards:think_format_reward'?"),
        ("my_package.rewards.exact", "Did you mean 'my_package.rewards:exact'?"),
        ("accuracy", "Did you mean 'trl.rewards:accuracy_reward'?"),
        ("get_soft_overlong_punishment", "makes a reward function"),
        ("rewards/mine.py", "Name a function of the file: 'rewards/mine.py:function'."),
        ("exakt", "Did you mean 'exact'?"),
    ],
)
def test_rewards_as_trl_names_them(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown name '{re.escape(name)}'\. ?.*{re.escape(message)}"):
        Rewarder([name]).close()


def test_every_reward_of_trl_is_suggested() -> None:
    rewards = pytest.importorskip("trl.rewards")
    for name in rewards._import_structure.values() if hasattr(rewards, "_import_structure") else []:
        for one in name:
            assert f"trl.rewards:{one}" in reward_hint(one, ())
