"""Runs of a few steps with the advantages that ask for more than one group's rewards, and with groups that grow."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from winnow import ConfigError, Trainer
from winnow.run.plan import plan
from winnow.study.compare_data import read_run_data

from ..builders.runs import _train_until, assert_clean, fingerprint, metrics_of, resume, resume_after_each, train


@pytest.mark.parametrize("advantage", [{"name": "max_at_k", "k": 2}, {"name": "max_at_k", "k": 4}, "reinforce_pp"])
def test_short_runs(tiny_config: dict[str, Any], advantage: Any) -> None:
    run = Path(tiny_config["output_dir"])
    train(tiny_config | {"advantage": advantage, "eval_steps": None, "max_steps": 2, "loss_type": "sequence_sum"})
    assert all(m["updated"] == 1.0 and m["grad_norm"] > 0 for m in metrics_of(run))
    assert_clean(run)


def test_remax_is_bit_exact_after_a_resume_at_every_step(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config | {"advantage": "remax", "max_steps": 3, "eval_steps": 3}
    whole = tmp_path / "whole"
    train(config | {"output_dir": str(whole)})
    part = resume_after_each(config | {"output_dir": str(tmp_path / "part")}, (1, 2))
    assert fingerprint(part) == fingerprint(whole)
    assert_clean(part)
    db = sqlite3.connect(whole / "ledger.sqlite")
    assert db.execute("SELECT COUNT(*), MAX(sibling) FROM rollouts").fetchone() == (3 * 4 * 5, 4)
    assert db.execute("SELECT DISTINCT fate FROM rollouts WHERE sibling = 4").fetchall() == [("trained",)]
    wrong = db.execute(
        "SELECT COUNT(*) FROM outcomes o WHERE ABS(mean_reward - (SELECT AVG(reward) FROM rollouts r"
        " WHERE r.visit = o.visit AND r.sibling < 4)) > 1e-12"
    )
    assert wrong.fetchone() == (0,)
    last = metrics_of(whole)[-1]
    assert last["rows"] == 16, "a greedy baseline is no row"
    assert last["groups/size_mean"] == 4
    tokens = db.execute("SELECT SUM(tokens) FROM rollouts").fetchone()[0]
    assert last["num_tokens"] == tokens, "its tokens were paid for"
    assert sum(m.get("rollouts/sampled", 0) for m in metrics_of(whole)) == 3 * 4 * 5
    assert read_run_data(whole).curve[-1].rollouts == 3 * 4 * 5, "comparisons count what was paid for"


def test_a_baseline_that_fails_takes_its_group_with_it(tiny_config: dict[str, Any]) -> None:
    def fails_for_the_last(completions: list[str], **_: object) -> list[Any]:
        return [float(len(c.split()) % 2) for c in completions[:-1]] + [RuntimeError("judge gone")]

    config = tiny_config | {"advantage": "remax", "max_steps": 1, "eval_steps": None}
    Trainer(config=config, reward_funcs=fails_for_the_last).train()
    run = Path(config["output_dir"])
    assert metrics_of(run)[-1]["updated"] == 0.0
    assert_clean(run)
    db = sqlite3.connect(run / "ledger.sqlite")
    (reason,) = db.execute("SELECT DISTINCT reason FROM rollouts WHERE sibling < 4").fetchone()
    assert "the greedy baseline has no reward" in reason
    assert "judge gone" in reason


def test_groups_grow_and_a_resume_knows_it(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    size = {"name": "adaptive_k", "base": 2, "high": 6, "tau": 0.0, "window": 2}
    config = tiny_config | {"group_size": size, "eval_steps": None}
    whole = tmp_path / "whole"
    train(config | {"output_dir": str(whole)})
    assert [m["groups/size_mean"] for m in metrics_of(whole)] == [2, 2, 6, 6]
    part = resume_after_each(config | {"output_dir": str(tmp_path / "part")}, (1, 2, 3))
    assert fingerprint(part) == fingerprint(whole)


def test_the_plan_counts_the_largest_groups_and_the_baselines(tiny_config: dict[str, Any]) -> None:
    trainer = Trainer(config=tiny_config | {"group_size": "adaptive_k", "advantage": "remax"})
    planned = plan(trainer)
    assert planned["rollouts_per_step"] == 4 * (8 + 1)
    assert planned["max_sampled_tokens_per_step"] == 4 * 9 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": {"name": "max_at_k", "k": 5}}, r"max_at_k.*at least 5 rollouts.*only 4"),
        (
            {"advantage": {"name": "max_at_k", "k": 4}, "group_size": {"name": "adaptive_k", "base": 3}},
            r"at least 4 rollouts.*only 3",
        ),
        ({"group_size": {"name": "adaptive_k", "high": 4}}, r"group_size: base=4 must be below high=4"),
        ({"advantage": "opob"}, r"advantage: opob.*policy_loss: plain"),
        ({"advantage": "otb", "policy_loss": "plain", "beta": 0.1}, r"advantage: otb.*beta: 0"),
        (
            {"advantage": "opob", "policy_loss": "plain", "correction": {"name": "mask", "only_negative": True}},
            r"advantage: opob.*sign of the advantage",
        ),
        ({"advantage": "opob", "policy_loss": "plain", "correction": "m2po"}, r"sign of the advantage"),
    ],
)
def test_sizes_that_cannot_work_are_refused_at_the_start(
    tiny_config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(config=tiny_config | options)
    assert not Path(tiny_config["output_dir"]).exists()


@pytest.mark.parametrize("schedule", ["linear", "warmup_stable_decay"])
def test_a_schedule_shaped_by_max_steps_holds_it_fixed_on_a_resume(tiny_config: dict[str, Any], schedule: str) -> None:
    options = {"lr_decay_steps": 2} if schedule == "warmup_stable_decay" else {}
    config = tiny_config | {"lr_scheduler_type": schedule, "lr_end": 1e-4, "max_steps": 2, "eval_steps": None} | options
    train(config)
    with pytest.raises(ConfigError, match="max_steps: was 2, is 4"):
        resume(Path(config["output_dir"]), {"max_steps": 4})


IN_UPDATE = {"policy_loss": "plain", "correction": "truncate", "loss_type": "sequence_sum"}


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize(
    ("advantage", "options"),
    [
        ("opob", {"tokens_per_microbatch": 60}),
        ({"name": "opob", "scope": "minibatch", "scale": True}, {"tokens_per_microbatch": 60, "num_iterations": 2}),
        ({"name": "opob", "scale": True}, {"lora": {"r": 2, "dropout": 0.1}}),
        ({"name": "opob"}, {"gradient_checkpointing": True}),
        ("otb", {"tokens_per_microbatch": 60}),
        ("opo", {}),
    ],
)
def test_optimal_baselines_are_bit_exact_after_a_resume(
    tiny_config: dict[str, Any], tmp_path: Path, advantage: Any, options: dict[str, Any]
) -> None:
    config = tiny_config | IN_UPDATE | {"advantage": advantage, "max_steps": 3, "eval_steps": None} | options
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(config | {"output_dir": str(whole)})
    _train_until(config | {"output_dir": str(part)}, 2)
    resume(part)
    assert fingerprint(part) == fingerprint(whole)
    assert_clean(part)
    for m in metrics_of(whole):
        assert m["updated"] == 1.0
        assert m["grad_norm"] > 0
        if advantage not in ("otb", "opo"):
            assert 0 < m["rollout_grad_norm/min"] <= m["rollout_grad_norm/mean"] <= m["rollout_grad_norm/max"]
        if advantage != "opo":
            assert 0 < m["baseline/mean"] < 1


def test_opob_with_every_method_and_a_resume(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    methods: dict[str, Any] = {
        "advantage": "opob",
        "policy_loss": "plain",
        "selector": "greso",
        "filter": "zero_variance",
        "gates": [{"name": "arrol", "at": 3, "cold_start": 1}],
        "audit": {"epsilon": 0.3},
        "max_lag": 1,
        "correction": "truncate",
        "step_scale": "ess",
    }
    config = tiny_config | methods | {"num_generations": 8, "learning_rate": 1e-5, "max_steps": 3, "eval_steps": None}
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(config | {"output_dir": str(whole)})
    _train_until(config | {"output_dir": str(part)}, 2)
    resume(part)
    assert fingerprint(part) == fingerprint(whole)
    assert_clean(part)
    assert all(m["rollout_grad_norm/max"] > 0 for m in metrics_of(whole) if m["rows"])
