"""Without an option of Winnow's, a run inside TRL is TRL's own, bit for bit: parameters and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset, IterableDataset
from trl import GRPOTrainer

from winnow.integrations.trl import WinnowGRPOTrainer

from ..builders.trl_runs import G, proven, settings

STEPS = 4
PROMPTS = [f"{a} {b} 2" + " 3" * (a % 3) for a in range(1, 5) for b in range(1, 4)]
"""Twelve of different lengths."""
ROWS = [{"prompt": prompt, "row": i} for i, prompt in enumerate(PROMPTS)]
TIMES = ("time", "runtime", "per_second")


def words(completions: list[str], row: list[int], **columns: Any) -> list[float]:
    return [float(len(c.split()) % 3 + i % 2) for c, i in zip(completions, row, strict=True)]


def odd(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(c.split()) % 2) for c in completions]


def sometimes(completions: list[str], row: list[int], **columns: Any) -> list[float | None]:
    """None for some completions, and for every one of some prompts."""
    rewards = words(completions, row)
    return [None if i % 4 == 0 or k % 3 == 0 else r for k, (i, r) in enumerate(zip(row, rewards, strict=True))]


FOUR = {"per_device_train_batch_size": G}
CASES: dict[str, dict[str, Any]] = {
    **{f"loss {name}": {"loss_type": name} for name in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo")},
    "loss luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    **{f"scale {name}": {"scale_rewards": name} for name in ("none", "batch", False, True)},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    "accumulation": {"gradient_accumulation_steps": 2, **FOUR},
    "accumulation, dr_grpo": {"gradient_accumulation_steps": 4, "loss_type": "dr_grpo", **FOUR},
    "accumulation, bnpo": {"gradient_accumulation_steps": 2, "loss_type": "bnpo", **FOUR},
    "accumulation, batch": {"gradient_accumulation_steps": 2, "scale_rewards": "batch", **FOUR},
    "iterations": {"num_iterations": 2},
    "iterations and accumulation": {"num_iterations": 2, "gradient_accumulation_steps": 2, **FOUR},
    "several updates a generation": {"steps_per_generation": 2, **FOUR},
    "several generations an update": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "neither divides": {"steps_per_generation": 2, "gradient_accumulation_steps": 3, **FOUR},
    "delta": {"delta": 1.5, "num_iterations": 2},
    "epsilon_high": {"epsilon": 0.1, "epsilon_high": 0.3, "num_iterations": 2},
    "beta": {"beta": 0.1},
    "beta, without bias correction": {"beta": 0.1, "use_bias_correction_kl": False, "num_iterations": 2},
    "reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "entropy": {"entropy_coef": 0.01},
    "entropy against": {"entropy_coef": -0.01},
    "entropy, adaptive": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "mask truncated": {"mask_truncated_completions": True, "max_completion_length": 10},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "num_iterations": 2},
    "sampling": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "repetition penalty": {"repetition_penalty": 1.1},
    "generation_kwargs": {"generation_kwargs": {"no_repeat_ngram_size": 3}},
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "weights": {"reward_funcs": [words, odd], "reward_weights": [0.3, 2.0]},
    "normalize_then_sum": {"reward_funcs": [words, odd], "multi_objective_aggregation": "normalize_then_sum"},
    "no reward": {"reward_funcs": sometimes},
    "no reward, beta": {"reward_funcs": sometimes, "beta": 0.1, "gradient_accumulation_steps": 2, **FOUR},
    "no reward, normalize_then_sum": {
        "reward_funcs": [sometimes, odd],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": G},
    "optimizer": {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "bfloat16": {"bf16": True},
    "streaming": {"train_dataset": IterableDataset.from_generator(lambda: iter(ROWS))},
    "saves": {"save_strategy": "steps", "save_steps": 1, "num_iterations": 3},
}
FAST = ["accumulation, bnpo", "neither divides", "no reward, beta", "pad_to_multiple_of", "normalize_then_sum"]


def trained(
    trainer_class: type, case: dict[str, Any], model: Path, out: Path
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Parameters after training, and the logs without times."""
    given = {"reward_funcs": words, "train_dataset": Dataset.from_list(ROWS)} | {
        key: case[key] for key in ("reward_funcs", "train_dataset") if key in case
    }
    usual = {"per_device_train_batch_size": 2 * G, "max_steps": STEPS, "shuffle_dataset": False}
    args = settings(out, **usual | {key: value for key, value in case.items() if key not in given})
    if args.eval_strategy != "no":
        given["eval_dataset"] = Dataset.from_list(ROWS[:2])
    trainer = trainer_class(model=str(model), args=args, **given)
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert not torch.equal(before, after), "nothing was trained"
    logs = [
        {k: v for k, v in line.items() if not k.startswith("winnow/") and not k.endswith(TIMES)}
        for line in trainer.state.log_history
    ]
    return after, logs


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_plain_is_trl_bit_for_bit(name: str, tiny_model: Path, tmp_path: Path) -> None:
    theirs, their_logs = trained(GRPOTrainer, CASES[name], tiny_model, tmp_path / "trl")
    ours, our_logs = trained(WinnowGRPOTrainer, CASES[name], tiny_model, tmp_path / "winnow")
    assert torch.equal(ours, theirs)
    assert str(our_logs) == str(their_logs)  # NaN is NaN
    proven(tmp_path / "winnow")
