"""Agents whose histories change, inside TRL."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from winnow import ConfigError
from winnow.env.dataset import DatasetConfig
from winnow.integrations.trl import WinnowGRPOTrainer, env_reward
from winnow.tasks.agents import with_agent

from ..builders.compacting import example, model
from ..builders.trl_runs import metrics, proven, settings

__all__ = ["example", "model"]  # fixtures


def trainer_of(example: Any, model: Path, agent: Any, out: Path, given: dict[str, Any], **methods: Any) -> Any:
    task = with_agent(DatasetConfig(str(model / "rows.jsonl")).build(), agent, max_turn_length=1)
    usual = {"max_completion_length": 120, "learning_rate": 3e-3, "num_generations": 8, "max_steps": 3}
    usual |= {"lr_scheduler_type": "constant"} | given
    usual["per_device_train_batch_size"] = 4 * usual["num_generations"] // usual.get("steps_per_generation", 1)
    return WinnowGRPOTrainer(
        model=str(model), reward_funcs=env_reward, args=settings(out, **usual), env=task, **methods
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "methods"),
    [
        ({"num_generations": 16}, {"filter": "zero_variance", "advantage": "rloo"}),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2, "beta": 0.001, "loss_type": "bnpo"}, {}),
        ({"importance_sampling_level": "sequence"}, {"advantage": "grpo", "selector": "greso"}),
        ({}, {"advantage": "opob", "step_scale": "ess"}),
    ],
)
def test_an_agent_that_compacts_its_history_trains(
    given: dict[str, Any], methods: dict[str, Any], example: Any, model: Path, tmp_path: Path
) -> None:
    """TRL computes every token under the prompt that it was sampled on: as the engine, which computed it there."""
    trainer_of(example, model, example.compacting, tmp_path, given, **methods).train()
    proven(tmp_path)
    rows = metrics(tmp_path)
    assert len(rows) == 3
    assert all(row["segments/mean"] > 1 for row in rows)
    assert all(0 < row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)


def test_agents_with_rewards_of_their_own_are_refused(example: Any, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env: the agents .* have rewards of their own.* train with winnow\.Trainer"):
        trainer_of(example, model, example.play, tmp_path, {}).train()


def test_fewer_prompts_than_a_batch_are_refused_before_a_run_of_no_step(
    example: Any, model: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(example, model, example.compacting, tmp_path, {"gradient_accumulation_steps": 2})
    with pytest.raises(ConfigError, match="train_dataset: 4 prompts, but a batch has 8"):
        trainer.train()
    assert not (tmp_path / "winnow").exists()


def test_what_any_limit_cuts_is_masked_and_counted_as_truncated(example: Any, model: Path, tmp_path: Path) -> None:
    """Also where the last token ends a turn, by which TRL judges: the limit on turns cut the rollout."""

    def impatient(base_url: str, prompt: str, answer: str) -> float:
        said, _ = example.ask(base_url, [example.user(prompt)])
        with contextlib.suppress(OSError):
            if answer in ("red", "blue"):
                example.ask(base_url, [example.user("ask")])
        return float(said == answer) + len(said) / 64

    task = with_agent(DatasetConfig(str(model / "rows.jsonl")).build(), impatient, max_turns=1)
    given = {"max_completion_length": 120, "max_steps": 1, "mask_truncated_completions": True}
    given |= {"num_generations": 4, "per_device_train_batch_size": 16}
    trainer = WinnowGRPOTrainer(model=str(model), reward_funcs=env_reward, args=settings(tmp_path, **given), env=task)
    trainer.train()
    totals, (row,) = proven(tmp_path), metrics(tmp_path)
    assert row["completions/clipped_ratio"] == row["truncated/max_turns"] == 0.5
    assert [log["completions/clipped_ratio"] for log in trainer.state.log_history[:1]] == [0.5]
    assert totals["trained"]["rollouts"] == totals["filtered"]["rollouts"] == 8
    assert row["sampling/sampling_logp_difference/max"] < 1e-4
