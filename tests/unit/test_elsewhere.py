"""Keys of other trainers: each works here or is answered with what to write instead."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from winnow.base.elsewhere import FLAT, NESTED
from winnow.config import ConfigError, RunConfig, validate

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
    assert sorted(theirs - OURS - set(FLAT)) == []
    for key in theirs - OURS:
        (line,) = answer({key: {"a": 1} if key.endswith("kwargs") else 1})
        assert line.startswith(f"unknown key '{key}'. Here "), line


def test_answers_name_keys_that_exist() -> None:
    known = OURS | {"slots", "name", "path", "preset", "prompt_column", "r", "alpha"}
    values = {"local", "vllm", "grpo", "rloo", "dr_grpo", "reinforce_pp", "remax", "plain", "mask", "m2po", "ray"}
    for said in {*FLAT.values(), *(answer for _, answer in NESTED)}:
        for quoted in re.findall(r"`([^`]+)`", said):
            first = re.split(r"[:, ]", quoted)[0]
            fine = (
                first in known | values
                or quoted.startswith(("winnow ", "hf "))
                or "/" in quoted
                or first == "max_turns"
            )
            assert fine, said
    assert not set(FLAT) & OURS


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
        ({"actor_rollout_ref": {}}, "unknown key 'actor_rollout_ref'."),
        ({"learning_rat": 1e-6}, "unknown key 'learning_rat'. Did you mean 'learning_rate'?"),
    ],
)
def test_what_is_said(settings: dict[str, Any], message: str) -> None:
    (line,) = answer(settings)
    assert line.startswith(message)
