"""Faults of samplers and ranks in runs with every method on: accounts stay clean, and errors name who it was."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from winnow import Trainer
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError
from winnow.run import checkpoint
from winnow.sampler.handle import SamplerHandle
from winnow.sampler.pool import SamplerPool

from .. import parity
from ..builders.nodes import assert_clean, more_steps, processes, restarts, rows, train_while, wait_for
from ..builders.poisoned import WEIGHT, poisoned
from ..builders.trained_runs import assert_trained

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("local_cluster")

REWARD = f"{parity.__file__}:parity_reward"
FSDP = {"name": "fsdp", "ranks": 2, "timeout_s": 120}
ENDLESS = {"max_steps": 100_000, "save_steps": 100_000, "learning_rate": 1e-6}
"""Has no end by itself: it learns slowly, since a run whose prompts are all solved stops."""


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    return tiny_config | {"reward_funcs": [REWARD], "save_steps": 1}


EVERYTHING = {
    "sync": {"name": "ray", "samplers": 2, "max_restarts": 50},
    "max_lag": 2,
    "num_generations": 8,
    "max_failed_share": 1.0,  # deaths in quick succession fail what they hit twice
    "selector": "greso",
    "filter": {"name": "zero_variance", "max_refill_rounds": 100},  # what dies twice has no signal either
    "gates": [{"name": "arrol", "at": 3, "cold_start": 1}],
    "audit": {"epsilon": 0.3},
    "correction": "truncate",
    "step_scale": "ess",
    "policy_loss": "plain",
    "eval_steps": 2,
}


def kill_samplers(config: dict[str, Any], kills: int) -> None:
    """At random moments of their lives; then some steps in peace, and a resume."""
    draws = random.Random(0)

    def kill(pool: SamplerPool) -> None:
        killed, before = set[int](), list[SamplerHandle]()
        for _ in range(kills):
            if draws.random() < 0.7:  # they have finished groups since; else they may not even have started
                wait_for(lambda before=before: pool._members != before)  # type: ignore[misc]
                wait_for(lambda: not any(m.consecutive_failures for m in pool._members))
            time.sleep(draws.uniform(0, 0.5))
            wait_for(lambda: {p.pid for p in processes("SamplerActor")} - killed)
            victim = draws.choice(sorted({p.pid for p in processes("SamplerActor")} - killed))
            before = list(pool._members)
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        assert len(rows(config)) >= max(1, kills // 10), "it went on between the deaths"
        more_steps(config, 4)

    train_while(config | ENDLESS, kill)
    steps = len(rows(config))
    assert restarts(config) >= kills
    wait_for(lambda: not processes("SamplerActor"), 30)
    Trainer.resume(config["output_dir"], {"max_steps": steps + 2}).train()
    assert_trained(Path(config["output_dir"]), steps + 2)
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["pruned"]["rollouts"] > 0
    assert sum("eval/pass@1" in row for row in rows(config)) >= steps // 2
    wait_for(lambda: not processes("SamplerActor"), 30)


def test_samplers_killed_at_random_moments(config: dict[str, Any]) -> None:
    kill_samplers(config | EVERYTHING, kills=2)


@pytest.mark.slow
def test_samplers_killed_fifty_times_in_one_run(config: dict[str, Any]) -> None:
    kill_samplers(config | EVERYTHING, kills=50)


@pytest.mark.slow
def test_poisoned_weights_reach_no_actor(config: dict[str, Any]) -> None:
    config |= {"sync": "ray", "max_lag": 1, "eval_steps": None}
    with pytest.raises(
        FloatingPointError, match=f"the learner's weight '{WEIGHT}' is not finite; it was not published"
    ):
        poisoned(Trainer(config=config), at_update=3).train()
    assert checkpoint.steps(Path(config["output_dir"])) == [1, 2]
    wait_for(lambda: not processes("SamplerActor"), 30)
    Trainer.resume(config["output_dir"]).train()
    assert_trained(Path(config["output_dir"]), 4)


def on_rank(trainer: Trainer, rank: int, act: Callable[[Any], None]) -> None:
    """Do something to a rank where it runs."""
    actor = trainer.learner._ranks._actors[rank]  # type: ignore[attr-defined]
    ray.get(actor.__ray_call__.remote(act), timeout=60)


@pytest.mark.slow
def test_poisoned_weights_of_a_rank(config: dict[str, Any]) -> None:
    """Only one of them has a NaN, in its own shard."""

    def poison(rank: Any) -> None:
        import torch

        apply, updates = rank.learner.apply, []

        def apply_badly(lr: float) -> float:
            norm = apply(lr)
            updates.append(norm)
            if len(updates) == 3:
                with torch.no_grad():
                    next(iter(rank.learner._params.values())).to_local().view(-1)[0] = torch.nan
            return norm

        rank.learner.apply = apply_badly

    trainer = Trainer(config=config | {"learner": FSDP, "eval_steps": None})
    on_rank(trainer, 1, poison)
    with pytest.raises(FloatingPointError, match=r"the learner's weight '.*' is not finite; it was not published"):
        trainer.train()
    assert checkpoint.steps(Path(config["output_dir"])) == [1, 2]
    wait_for(lambda: not processes("Rank"), 30)
    Trainer.resume(config["output_dir"]).train()
    assert_trained(Path(config["output_dir"]), 4)


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_last_words(config: dict[str, Any]) -> None:
    """The other waits for it, inside an operation that only both can end."""

    def fail(rank: Any) -> None:
        apply, updates = rank.learner.apply, []

        def apply_badly(lr: float) -> float:
            updates.append(lr)
            if len(updates) == 3:
                raise KeyError("no such weight")
            return float(apply(lr))

        rank.learner.apply = apply_badly

    trainer = Trainer(config=config | {"learner": FSDP, "sync": {"name": "ray", "samplers": 1}, "max_lag": 1})
    on_rank(trainer, 1, fail)
    with pytest.raises(
        RunStoppedError, match=r"learner: rank 1 failed: (.|\n)*KeyError: 'no such weight'(.|\n)*resume"
    ):
        trainer.train()
    wait_for(lambda: not processes("Rank") and not processes("SamplerActor"), 30)
    Trainer.resume(config["output_dir"]).train()
    assert_trained(Path(config["output_dir"]), 4)
    wait_for(lambda: not processes("Rank") and not processes("SamplerActor"), 30)


VLLM = {"name": "vllm", "slots": 16, "max_length": 64, "args": {"kv_cache_memory_bytes": 1 << 26}}


@pytest.fixture
def vllm_config(config: dict[str, Any], wide_model: Path) -> dict[str, Any]:
    pytest.importorskip("vllm")
    sync = {"name": "ray", "samplers": 1, "max_restarts": 1}
    return config | {"model": str(wide_model), "engine": VLLM, "sync": sync, "max_lag": 1, "eval_steps": None}


def end_core(member: SamplerHandle) -> None:
    """Of the vLLM engine that a sampler has, or as soon as it has one with weights: what it is asked next fails."""

    def end(actor: Any) -> None:
        import gc
        import threading
        import time

        from winnow.engine.vllm.engine import VllmEngine

        def wait_and_end() -> None:
            engine = None
            while engine is None:
                gc.unfreeze()  # vLLM hides what it has made
                engine = next((x for x in gc.get_objects() if isinstance(x, VllmEngine)), None)
            while not engine._loads:
                time.sleep(0.001)
            engine._core._shut_down()

        threading.Thread(target=wait_and_end, daemon=True).start()

    with contextlib.suppress(ray.exceptions.RayError):  # it may be gone before it has answered
        ray.get(member.channel._actor.__ray_call__.remote(end), timeout=60)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_vllm_core_that_dies_and_an_actor_that_is_killed(vllm_config: dict[str, Any]) -> None:
    """Both while sequences run: the sampler is replaced, and what it worked on is launched once more."""

    def kill(member: SamplerHandle) -> None:
        os.kill(processes("SamplerActor")[0].pid, signal.SIGKILL)

    def act(pool: SamplerPool) -> None:
        for fault in (end_core, kill):
            more_steps(vllm_config)
            [member] = pool._members
            wait_for(lambda member=member: member.flights)  # type: ignore[misc]
            fault(member)
            wait_for(lambda member=member: pool._members[0] is not member and pool._members[0].ready)  # type: ignore[misc]
        more_steps(vllm_config)

    train_while(vllm_config | ENDLESS, act)
    assert_clean(vllm_config)
    assert restarts(vllm_config) == 2
    assert sum(row["sampler/redispatched"] for row in rows(vllm_config)) >= 1
    wait_for(lambda: not processes("SamplerActor"), 30)


@pytest.mark.slow
def test_vllm_cores_that_keep_dying_are_named_with_their_last_words(vllm_config: dict[str, Any]) -> None:
    trainer, ended = Trainer(config=vllm_config | ENDLESS | {"max_failed_share": 1.0}), threading.Event()

    def keep_ending() -> None:
        seen: list[SamplerHandle] = []
        while not ended.wait(0.01):
            for member in [m for m in trainer.sampler._members if m not in seen]:  # type: ignore[attr-defined]
                seen.append(member)
                end_core(member)

    threading.Thread(target=keep_ending, daemon=True).start()
    words = (
        r"sampler 0 on .* exited \((.|\n)*/vllm/(.|\n)*\n\w*Error: .*\n\)\n2 times in a row"  # where, what was raised
    )
    try:
        with pytest.raises(RunStoppedError, match=words):
            trainer.train()
    finally:
        ended.set()
    assert_clean(vllm_config)
    wait_for(lambda: not processes("SamplerActor"), 30)
