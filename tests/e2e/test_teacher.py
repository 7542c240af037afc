"""Runs with a teacher: they learn from it alone, resume bit for bit, and keep its tokens apart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from winnow import ConfigError, Trainer
from winnow.record.costs import costs_of, tokens_table

from ..builders.runs import CARRYING, assert_clean, fingerprint, metrics_of, resume, resume_after_each, train


@pytest.fixture
def teacher(tiny_model: Path, tmp_path: Path) -> Path:
    """The policy with other weights."""
    path = tmp_path / "teacher"
    shutil.copytree(tiny_model, path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


def teaching(config: dict[str, Any], teacher: Path, **options: Any) -> dict[str, Any]:
    return config | {"teacher": {"model": str(teacher), **options}}


def test_a_policy_approaches_its_teacher_without_rewards(tiny_config: dict[str, Any], teacher: Path) -> None:
    config = teaching(tiny_config, teacher, reward_weight=0.0) | {"max_steps": 12, "max_skipped_steps": 2}
    train(config)
    run = Path(config["output_dir"])
    assert_clean(run)
    rows = [row for row in metrics_of(run) if "teacher/kl" in row]
    assert len(rows) == 12, "a step whose rewards are equal is no step without signal"
    assert sum(row["teacher/kl"] for row in rows[-3:]) < 0.8 * sum(row["teacher/kl"] for row in rows[:3])
    table = tokens_table(costs_of(rows), trained=1)
    assert table is not None
    assert [row[0] for row in table.rows][-1:] == ["read by the teacher"]
    assert rows[-1]["num_teacher_tokens"] == sum(row["teacher/tokens"] for row in rows)
    assert all(row["seconds/update/teacher"] > 0 for row in rows)


@pytest.mark.parametrize("options", [{"model": True}, {"prompt": "{prompt} {target}"}])
def test_resume_is_bit_for_bit(
    tiny_config: dict[str, Any], teacher: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {"model": str(teacher)} if "model" in options else options
    config = tiny_config | CARRYING | {"teacher": options, "policy_loss": "clip", "correction": "none"}
    train(config)
    again = resume_after_each(config | {"output_dir": str(tmp_path / "again")}, [1, 3])
    assert fingerprint(again) == fingerprint(Path(config["output_dir"]))
    assert_clean(again)


def test_a_resume_with_another_teacher_is_refused(tiny_config: dict[str, Any], teacher: Path, tiny_model: Path) -> None:
    config = teaching(tiny_config, teacher)
    train(config | {"max_steps": 2})
    shutil.copy(tiny_model / "model.safetensors", teacher / "model.safetensors")
    with pytest.raises(ConfigError, match="the teacher is not the one this run was saved with"):
        resume(Path(config["output_dir"]), {"max_steps": 4})


def test_the_policy_without_its_adapter_can_teach(tiny_config: dict[str, Any]) -> None:
    config = tiny_config | {"lora": {"r": 4}, "teacher": {"adapter": False}}
    train(config)
    rows = [row for row in metrics_of(Path(config["output_dir"])) if "teacher/kl" in row]
    assert rows[0]["teacher/kl"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["teacher/kl"] != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"reuse": {"updates": 2}, "step_scale": "ess"},
        {"policy_loss": "cispo"},
        {"policy_loss": "gspo_token", "max_lag": 1, "rollout_batch": "adaptive", "filter": "zero_variance"},
        {"filter": "zero_variance", "gates": ["arrol"]},
        {"beta": 0.01, "advantage": "max_at_k"},
        {"num_iterations": 2, "correction": "truncate"},
        {"mask_truncated_completions": True},
        {"sync": {"name": "processes", "samplers": 1}, "max_lag": 1, "correction": "truncate"},
        {"group_size": {"name": "sequential", "probe": 2}, "selector": "thompson"},
    ],
)
def test_with_every_other_method(tiny_config: dict[str, Any], teacher: Path, more: dict[str, Any]) -> None:
    config = teaching(tiny_config, teacher) | more
    reward = f"{Path(__file__).resolve().parent.parent / 'parity.py'}:parity_reward"
    Trainer(config=config | {"reward_funcs": [reward]}).train()
    assert_clean(Path(config["output_dir"]))
