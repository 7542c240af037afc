"""Whole runs on a two-layer model: training, bit-exact resume, proof of the ledger, interrupts, stops."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.run.checkpoint import CheckpointError

from ..builders.runs import (
    CARRYING,
    REPEATING,
    assert_clean,
    fingerprint,
    metrics_of,
    resume,
    resume_after_each,
    train,
)

OPOB = {"advantage": "opob", "policy_loss": "plain"}
OVERLAP = {"name": "in_process", "overlap": True}
SYNCED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}


def test_a_run_leaves_everything_behind(tiny_config: dict[str, Any]) -> None:
    result = train(tiny_config)
    run = Path(tiny_config["output_dir"])
    assert result["step"] == 4
    assert {"config.json", "ledger.sqlite", "metrics.jsonl", "samples.jsonl", "model", "checkpoints"} <= set(
        os.listdir(run)
    )
    lines = metrics_of(run)
    assert [m["step"] for m in lines] == [0, 1, 2, 3, 4]
    assert [m["step"] for m in lines if "eval/pass@1" in m] == [0, 2, 4]
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/parity_reward/mean", "entropy", "grad_norm"):
        assert name in lines[-1]
    assert_clean(run)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run / "model")
    AutoTokenizer.from_pretrained(run / "model")


SLOW_RESUMES = (
    *("lora", "greso", "reprofiled", "lagged", "kl", "backoff", "drift", "drafts", "mixed"),
    *("overlapped, carrying", "overlapped, opob", "adafactor, ess, opob"),
)
"""`kl_in_reward` has the adapters and the penalty; compositions of everything (tests/pairs) resume with the others."""
RESUMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dapo": {
        "filter": {"name": "zero_variance"},
        "advantage": "rloo",
        "selector": "ordered",
    },
    "lora": {"lora": {"r": 2, "dropout": 0.1}, "beta": 0.1},
    "kl": {"beta": 0.05, "num_iterations": 2, "correction": "truncate", "entropy_coef": 0.01},
    "kl_in_reward": {"beta": 0.01, "kl_in_reward": True, "advantage": "rloo", "lora": {"r": 2, "dropout": 0.1}},
    "greso": CARRYING,
    "backoff": {
        "selector": "backoff",
        "filter": "zero_variance",
        "rollout_batch": {"name": "fixed", "surplus": "discard"},
    },
    "reprofiled": {
        "selector": {"name": "pass_rate", "refresh_steps": 2, "n": 4},
        "group_size": {"name": "adaptive_k", "window": 1},
    },
    "lagged": {"max_lag": 2, "step_scale": {"name": "ess", "reference": "measured"}},
    "mixed": CARRYING | {"max_lag": 3, "lora": {"r": 2}, "sync": {"name": "in_process", "lag": "mixed"}},
    "overlapped": {"max_lag": 1, "sync": OVERLAP},
    "overlapped, carrying": CARRYING | REPEATING | {"max_lag": 2, "sync": OVERLAP, "speculative": True},
    "overlapped, opob": OPOB | {"max_lag": 1, "sync": OVERLAP, "correction": "truncate", "step_scale": "ess"},
    "drift": {"reference_kl_steps": 2},
    "drafts": CARRYING | REPEATING | {"speculative": True},
    "muon, synced reference": SYNCED | {"optim": "muon", "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "adafactor, ess, opob": OPOB
    | {"optim": "adafactor", "step_scale": "ess", "lr_scheduler_type": "cosine_with_restarts"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_RESUMES else ()) for name in RESUMES]
)
def test_resume_is_bit_exact_at_every_step(tiny_config: dict[str, Any], tmp_path: Path, name: str) -> None:
    """N steps are N steps however often the run was interrupted and resumed."""
    whole, options = tmp_path / "whole", RESUMES[name]
    train(tiny_config | options | {"output_dir": str(whole)})
    part = resume_after_each(tiny_config | options | {"output_dir": str(tmp_path / "part")}, range(1, 4))
    assert fingerprint(part) == fingerprint(whole)
    assert_clean(part)


def test_a_penalty_in_the_reward_is_seen_by_advantages_alone(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    """The first step samples the same groups with and without it, and every figure about rewards is the same."""
    found = []
    for name, options in (("without", {}), ("with", {"beta": 5.0, "kl_in_reward": True})):
        run = tmp_path / name
        methods = {"filter": {"name": "zero_variance", "refill": False}, "advantage": "rloo", "max_steps": 2}
        train(tiny_config | methods | options | {"output_dir": str(run), "learning_rate": 5e-3})
        found.append(metrics_of(run)[1:])
        assert_clean(run)
    without, with_ = found
    for key in ("reward", "reward_std", "frac_reward_zero_std", "groups/effective", "rows"):
        assert with_[0][key] == without[0][key]
    assert abs(with_[0]["kl_penalty"]) < 1e-5, "the first update starts at the reference"
    assert with_[1]["kl_penalty"] != 0
    assert "kl_penalty" not in without[0]


@pytest.mark.cases(one_in=2)
@pytest.mark.parametrize("adapters", [{}, {"lora": {"r": 2, "dropout": 0.1}}], ids=["full", "lora"])
def test_measuring_the_distance_to_the_initial_policy_changes_nothing_else(
    tiny_config: dict[str, Any], tmp_path: Path, adapters: dict[str, Any]
) -> None:
    found = []
    for name, options in (("without", {}), ("with", {"reference_kl_steps": 1}), ("sparse", {"reference_kl_steps": 3})):
        run = tmp_path / name
        settings = {"eval_steps": None, "learning_rate": 1e-2, "save_steps": 100}
        train(tiny_config | settings | adapters | options | {"output_dir": str(run)})
        found.append(fingerprint(run)["metrics"])
    without, with_, sparse = found
    measured = [metrics.pop("kl") for metrics in with_]
    assert abs(measured[0]) < 1e-5, "the first batch was sampled by the initial policy"
    assert measured[-1] > 1e-3
    assert with_ == without
    assert [metrics.get("kl") for metrics in sparse] == [None, None, measured[2], None]


def test_a_reference_that_follows_changes_the_penalty_and_nothing_before_it(
    tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for name, options in (("fixed", {"beta": 0.1}), ("synced", SYNCED)):
        run = tmp_path / name
        train(tiny_config | options | {"output_dir": str(run), "learning_rate": 1e-2, "save_steps": 100})
        found.append(fingerprint(run))
        assert_clean(run)
    fixed, synced = (found["metrics"] for found in found)
    assert synced[:3] == fixed[:3], "the first two steps, and what was evaluated before"
    assert 0 < synced[3]["kl"] < fixed[3]["kl"], "after half of the way to the policy"


@pytest.mark.parametrize("options", [{"kl_in_reward": True}, {"kl_estimator": "k2"}, SYNCED])
def test_a_run_held_to_a_reference_can_be_evaluated_without_one(
    tiny_config: dict[str, Any], options: dict[str, Any]
) -> None:
    from winnow.run.standalone import model_config

    train(tiny_config | {"beta": 0.1, "max_steps": 1, "eval_steps": None} | options)
    with model_config(tiny_config["output_dir"], {}) as (config, *_):
        assert config.beta == 0


def test_a_run_measured_against_a_reference_can_be_evaluated_without_one(tiny_config: dict[str, Any]) -> None:
    from winnow.run.standalone import model_config

    train(tiny_config | {"reference_kl_steps": 1, "max_steps": 1, "eval_steps": None})
    with model_config(tiny_config["output_dir"], {}) as (config, *_):
        assert not config.keeps_reference


def test_carried_groups_are_trained_one_step_late_and_booked_once(tiny_config: dict[str, Any]) -> None:
    train(tiny_config | CARRYING | {"max_steps": 6, "save_steps": 100})
    run = Path(tiny_config["output_dir"])
    assert_clean(run)
    with sqlite3.connect(run / "ledger.sqlite") as db:
        late = db.execute(
            "SELECT COUNT(*) FROM rollouts JOIN steps USING (step) WHERE fate = 'trained' AND version > first_version"
        ).fetchone()[0]
        skipped = db.execute("SELECT COUNT(*) FROM outcomes WHERE fate = 'skipped'").fetchone()[0]
        surplus = db.execute("SELECT DISTINCT reason FROM outcomes WHERE fate = 'surplus'").fetchall()
    assert late > 0, "otherwise this test and the resume test prove nothing about carried groups"
    assert skipped > 0
    assert surplus in ([], [("carried, but the run is over",)])


def test_what_runs_together_does_not_depend_on_how_long_rewards_take(
    tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    """Refill starts replacements while others still run: at the same engine steps, whatever the clock says."""

    def submissions(seconds: float) -> list[tuple[int, Any]]:
        def reward(completions: list[str], **columns: object) -> list[float]:
            time.sleep(seconds * (len(completions[0]) % 3))
            return [float(len(c.split()) % 2 and len(c) % 3) for c in completions]

        options = {"filter": "zero_variance", "max_steps": 2, "output_dir": str(tmp_path / str(seconds))}
        trainer = Trainer(config=tiny_config | options | {"max_completion_length": 40}, reward_funcs=reward)
        seen: list[tuple[int, Any]] = []
        steps = 0
        step, submit = trainer.engine.step, trainer.engine.submit

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        trainer.engine.step = counted  # type: ignore[method-assign]
        trainer.engine.submit = lambda r: (seen.extend((steps, q.id) for q in r), submit(r))[1]  # type: ignore[method-assign]
        trainer.train()
        return seen

    quick = submissions(0.0)
    assert len({at for at, _ in quick}) > 4, "replacements start at several moments"
    assert submissions(0.02) == quick


def _sometimes(completions: list[str], **columns: object) -> list[float]:
    """One prompt in three has a signal."""
    return [float(i % 2) if str(columns["target"][0])[-1] in "0369" else 0.0 for i in range(len(completions))]


def test_a_round_with_a_signal_fills_the_batch_however_many_groups_had_none(tiny_config: dict[str, Any]) -> None:
    """A round of 24 for a batch of 1, most of it rejected: that is no reason to stop."""
    options = {"prompts_per_step": 1, "rollout_batch": {"name": "fixed", "size": 24, "surplus": "discard"}}
    options["filter"] = {"name": "zero_variance", "max_refill_rounds": 1}
    Trainer(config=tiny_config | options, reward_funcs=_sometimes).train()
    assert_clean(Path(tiny_config["output_dir"]))


def test_a_resume_without_its_checkpoints_is_refused_and_keeps_the_model(tiny_config: dict[str, Any]) -> None:
    train(tiny_config)
    run = Path(tiny_config["output_dir"])
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="its checkpoints are missing"):
        resume(run)
    assert (run / "model" / "config.json").exists()


def test_accumulation_and_budget_do_not_change_what_is_trained(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    """One row a micro-batch or all at once: the same update up to rounding."""
    from safetensors.torch import load_file

    weights = []
    for name, budget in (("one", 1), ("all", 100_000)):
        train(tiny_config | {"output_dir": str(tmp_path / name), "tokens_per_microbatch": budget, "max_steps": 1})
        weights.append(load_file(tmp_path / name / "model" / "model.safetensors"))
    for key in weights[0]:
        assert (weights[0][key] - weights[1][key]).abs().max() < 1e-4


LOGGING_REWARD = """
def logging_reward(completions, trainer_state, log_metric, **columns):
    log_metric("seen_step", trainer_state.global_step)
    return [float(len(c.split()) % 2) for c in completions]
"""


@pytest.mark.parametrize("by_name", [True, False])
def test_rewards_see_the_trainer_state_and_log_metrics(
    tiny_config: dict[str, Any], tmp_path: Path, by_name: bool
) -> None:
    (tmp_path / "logging_reward.py").write_text(LOGGING_REWARD)
    namespace: dict[str, Any] = {}
    exec(LOGGING_REWARD, namespace)
    spec = f"{tmp_path / 'logging_reward.py'}:logging_reward" if by_name else namespace["logging_reward"]
    Trainer(config=tiny_config | {"eval_steps": None, "max_steps": 3}, reward_funcs=spec).train()
    lines = metrics_of(tmp_path / "run")
    assert [m["seen_step"] for m in lines] == [0, 1, 2], "the step under way"


def test_a_reward_whose_column_is_missing_is_refused_at_the_start(tiny_config: dict[str, Any]) -> None:
    def needs(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="solution"):
        Trainer(config=tiny_config, reward_funcs=needs)
    assert not Path(tiny_config["output_dir"]).exists()
