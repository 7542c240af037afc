"""kill -9 of samplers and of the learner: accounting stays exact, the lag bound holds, nobody is left behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from winnow import Trainer
from winnow.record.ledger import Ledger
from winnow.run.serve import PROCESS_NAME
from winnow.sampler.handle import SamplerHandle
from winnow.sampler.pool import SamplerPool

from .. import parity
from ..builders.samplers import process_of
from ..builders.trained_runs import assert_trained
from .harness import run

ORPHAN_S = 5.0
"""How long a sampler may outlive its learner."""


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    reward = f"{parity.__file__}:parity_reward"
    return tiny_config | {
        "sync": {"name": "processes", "max_restarts": 50},
        "max_lag": 2,
        "eval_steps": None,
        "reward_funcs": [reward],
        "max_failed_share": 1.0,  # deaths in quick succession fail what they hit twice
    }


WORKER = ("PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER")
"""What tells the processes of tests that run at a time apart: a sampler has its learner's environment."""


def samplers() -> list[psutil.Process]:
    """Those that live and that tests in this process have started; orphans, too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name() == PROCESS_NAME and process.status() != psutil.STATUS_ZOMBIE:
                theirs = process.environ()
                if all(theirs.get(name) == os.environ.get(name) for name in WORKER):
                    found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _kill_samplers(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kills: int, least: int) -> None:
    """Train until that many samplers were killed at random moments of their lives, then to the end.

    `least`: steps that must have been made between the deaths."""
    started: list[SamplerHandle] = []
    original = SamplerPool._start

    def remember(self: SamplerPool, slot: int) -> SamplerHandle:
        started.append(original(self, slot))
        return started[-1]

    monkeypatch.setattr(SamplerPool, "_start", remember)
    trainer = Trainer(config=config | {"max_steps": 100_000, "save_steps": 100_000})
    draws = random.Random(0)
    living: list[psutil.Process] = []
    run_dir = Path(config["output_dir"])

    def kill() -> None:
        for number in range(kills):
            while len(started) <= number:
                time.sleep(0.01)
            child = started[number]
            if draws.random() < 0.7:  # else it may not even have started to work
                while not child.ready and process_of(child).poll() is None:
                    time.sleep(0.01)
            time.sleep(draws.uniform(0, 1))
            while number == kills - 1 and not (run_dir / "metrics.jsonl").stat().st_size:  # a step between deaths
                time.sleep(0.01)
            os.kill(process_of(child).pid, signal.SIGKILL)
        while len(started) <= kills or not started[-1].ready:
            time.sleep(0.01)
        living.extend(samplers())
        trainer.stop()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    thread.join(10)
    steps = int(sorted((run_dir / "checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))
    assert steps >= least, "it went on between the deaths"
    Trainer.resume(run_dir, {"max_steps": steps + 4}).train()
    assert_trained(run_dir, steps + 4)
    assert len(started) == kills + 2
    assert len(living) == 1
    assert not samplers()


@pytest.mark.slow
def test_samplers_killed_at_random_moments(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _kill_samplers(config, monkeypatch, kills=2, least=1)


@pytest.mark.exhaustive
def test_a_sampler_killed_fifty_times_in_one_run(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _kill_samplers(config, monkeypatch, kills=50, least=5)


GATED = {
    "gates": [{"name": "arrol", "at": 3, "cold_start": 2}],
    "audit": {"epsilon": 0.2},
    "selector": "greso",
    "filter": {"name": "zero_variance", "max_refill_rounds": 100},  # what dies twice has no signal either
}
"""What each sampler decides by rules that the learner publishes."""


@pytest.mark.exhaustive
def test_a_sampler_killed_fifty_times_with_gates_on(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _kill_samplers(config | GATED, monkeypatch, kills=50, least=5)
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.totals()["pruned"]["rollouts"] > 0


def _kill_learner(config: dict[str, Any], kills: int) -> None:
    """Kill the learner at random lines of its metrics, look for orphans, go on; then to the end."""
    config = config | {"max_steps": 6 * kills + 6, "save_steps": 2}
    draws, line = random.Random(0), 0
    for _ in range(kills):
        line += draws.randint(1, 6)
        assert run(config, kill_at_line=line, delay_s=draws.uniform(0, 0.05)) == -signal.SIGKILL
        deadline = time.monotonic() + ORPHAN_S
        while samplers() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not samplers(), f"a sampler outlived its learner by {ORPHAN_S} s"
    assert run(config) == 0
    assert_trained(Path(config["output_dir"]), config["max_steps"])


@pytest.mark.slow
def test_a_killed_learner_leaves_nobody_and_goes_on(config: dict[str, Any]) -> None:
    _kill_learner(config, kills=1)


@pytest.mark.exhaustive
def test_a_learner_killed_ten_times(config: dict[str, Any]) -> None:
    _kill_learner(config, kills=10)
