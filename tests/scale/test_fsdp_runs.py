"""Runs over ranks: metrics, resumes on as many ranks or others, lost and frozen ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.learner import LearnerLostError
from winnow.learner.fsdp.ranks import Ranks
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError

from ..builders.runs import metrics_so_far
from ..unit.learner_models import random_rows
from .fsdp_ranks import FSDP, LOSSES, REWARD, over, policy

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("local_cluster")


@pytest.fixture
def run_config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"learner": FSDP, "reward_funcs": [REWARD], "eval_steps": None}


def figures(config: dict[str, Any]) -> list[dict[str, float]]:
    return [row for row in metrics_so_far(Path(config["output_dir"])) if "loss" in row]


def untimed(row: dict[str, float]) -> dict[str, float]:
    """What does not depend on the machine."""
    measured = ("time", "memory_mib")
    return {name: value for name, value in row.items() if not name.endswith(measured) and "second" not in name}


def assert_clean(config: dict[str, Any]) -> None:
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems


def test_a_run_over_ranks_and_a_sampler_and_its_resume(run_config: dict[str, Any], tmp_path: Path) -> None:
    """All methods on; the second half on three ranks."""
    everything = {
        "sync": "ray",
        "max_lag": 2,
        "num_generations": 8,
        "selector": "greso",
        "filter": "zero_variance",
        "gates": [{"name": "arrol", "cold_start": 1}],
        "audit": {"epsilon": 0.3},
        "advantage": "opob",
        "correction": "truncate",
        "step_scale": "ess",
        "policy_loss": "plain",
        "eval_steps": 2,
    }
    config = run_config | everything
    Trainer(config=config | {"max_steps": 3}).train()
    Trainer.resume(config["output_dir"], {"max_steps": 5, "learner": FSDP | {"ranks": 3}}).train()
    assert_clean(config)
    assert [row["step"] for row in figures(config)] == [1, 2, 3, 4, 5]
    assert max(row.get("lag/max", 0) for row in figures(config)) <= 2
    assert all(row["updated"] for row in figures(config))
    assert [min(row[f"rank/{rank}/memory_mib"] > 100 for row in figures(config)[3:]) for rank in range(3)] == [True] * 3


@pytest.mark.slow
def test_a_resume_on_as_many_ranks_is_exact(run_config: dict[str, Any], tmp_path: Path) -> None:
    whole = run_config | {"max_steps": 4, "save_steps": 2, "output_dir": str(tmp_path / "whole")}
    Trainer(config=whole).train()
    config = run_config | {"save_steps": 2}
    Trainer(config=config | {"max_steps": 2}).train()
    Trainer.resume(config["output_dir"], {"max_steps": 4}).train()
    for ours, theirs in zip(figures(config), figures(whole), strict=True):
        assert untimed(ours) == untimed(theirs)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_the_run_resumed(run_config: dict[str, Any]) -> None:
    config = run_config | {"max_steps": 1000, "save_steps": 1}
    trainer = Trainer(config=config)
    pid = ray.get(trainer.learner._ranks._actors[1].__ray_call__.remote(lambda self: os.getpid()), timeout=60)  # type: ignore[attr-defined]

    def kill() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(figures(config)) < 2:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RunStoppedError, match=r"learner: rank \d failed"):
        trainer.train()
    steps = len(figures(config))
    Trainer.resume(config["output_dir"], {"max_steps": steps + 1}).train()
    assert_clean(config)


def test_what_ranks_cannot_train_is_refused(run_config: dict[str, Any]) -> None:
    opob = {"advantage": "opob", "policy_loss": "plain", "gradient_checkpointing": True}
    with pytest.raises(
        ConfigError, match="learner: fsdp cannot find the baselines of opob with gradient_checkpointing"
    ):
        Trainer(config=run_config | opob)
    with pytest.raises(ConfigError, match="learner: 90 ranks need 90 CPUs and 0 GPUs, and the cluster has 8"):
        Trainer(config=run_config | {"learner": {"name": "fsdp", "ranks": 90}})


@pytest.mark.slow
def test_a_silent_rank_is_given_up(local_cluster: None) -> None:
    ranks = Ranks(world=1, threads=1, num_gpus=0, timeout_s=60)
    cut = over(ranks, policy())
    ranks.timeout_s = 3
    pid = ray.get(ranks._actors[0].__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(LearnerLostError, match="rank 0 said nothing for 3 s"):
        cut.apply(1e-3)


def on_ranks(ranks: Ranks, act: Any) -> list[Any]:
    """What a function of a rank returns on each of them."""
    return ray.get([actor.__ray_call__.remote(act) for actor in ranks._actors], timeout=60)


MANY = 2400
"""Rows that two ranks take ten seconds or more for."""


def test_a_frozen_rank_is_named_alone_and_a_long_call_is_none(local_cluster: None) -> None:
    """The other waits for it in a collective, and answers meanwhile."""
    ranks = Ranks(world=2, threads=1, num_gpus=0, timeout_s=120)
    cut = over(ranks, policy())
    ranks.timeout_s = 4
    pids = on_ranks(ranks, lambda rank: os.getpid())
    started = time.monotonic()
    cut.accumulate(random_rows(seed=0, n=MANY), LOSSES["plain"])
    assert time.monotonic() - started > 4, "longer than a rank may be silent"
    os.kill(pids[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(LearnerLostError, match="learner: rank 1 said nothing for 4 s"):
        cut.accumulate(random_rows(seed=0, n=4), LOSSES["plain"])
    assert time.monotonic() - started < 30


def test_ranks_that_hang_are_given_up_although_they_answer(local_cluster: None) -> None:
    def hang(rank: Any) -> None:
        rank.learner.apply = lambda lr: threading.Event().wait()

    ranks = Ranks(world=1, threads=1, num_gpus=0, timeout_s=120, size=20_000_000)
    cut = over(ranks, policy())
    ranks.timeout_s = 2
    on_ranks(ranks, hang)
    with pytest.raises(LearnerLostError, match="rank 0 made no progress for 4 s"):
        cut.apply(1e-3)
