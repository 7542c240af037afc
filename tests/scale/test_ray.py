"""Samplers as Ray actors: whole runs, and what happens when actors die."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from winnow import Trainer
from winnow.base import cluster
from winnow.base.errors import ConfigError
from winnow.cli.main import app
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import RunStoppedError
from winnow.run import preflight
from winnow.sampler import ray as sampler_ray

from .. import parity
from ..builders.nodes import wait_for
from ..builders.runs import REPEATING, metrics_of, metrics_so_far

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("local_cluster")

REWARD = f"{parity.__file__}:parity_reward"


@pytest.fixture
def config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    more = {"sync": {"name": "ray", "samplers": 2}, "max_lag": 1, "correction": "truncate", "reward_funcs": [REWARD]}
    return tiny_config | more


def assert_clean(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems
        return ledger.totals()


def metrics(config: dict[str, Any]) -> list[dict[str, float]]:
    return metrics_of(Path(config["output_dir"]))


def actors() -> list[psutil.Process]:
    """Of this test's cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone, or not yet buried
            if "SamplerActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_run_with_gates_and_evaluations(config: dict[str, Any]) -> None:
    """And its resume; the lag bound holds for every trained token."""
    config |= {"gates": [{"name": "arrol", "cold_start": 1}], "audit": {"epsilon": 0.3}, "num_generations": 8}
    Trainer(config=config | {"max_steps": 3}).train()
    Trainer.resume(config["output_dir"], {"max_steps": 5}).train()
    totals = assert_clean(config)
    assert totals["pruned"]["rollouts"] > 0
    rows = metrics(config)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
    assert max(row.get("lag/max", 0) for row in rows) <= 1
    assert sum("eval/pass@1" in row for row in rows) >= 3
    assert all(any(f"sampler/{slot}/memory_mib" in row for row in rows) for slot in range(2))


FIGURES = ("tokens_per_s", "idle", "groups", "lag", "restarts", "memory_mib")


def test_groups_in_two_parts(config: dict[str, Any]) -> None:
    """Also over a resume: siblings that join a probe may come from the other sampler."""
    config |= {"group_size": {"name": "sequential", "probe": 2}, "num_generations": 4, "filter": "zero_variance"}
    Trainer(config=config | {"max_steps": 2}).train()
    Trainer.resume(config["output_dir"], {"max_steps": 4}).train()
    totals = assert_clean(config)
    assert totals["trained"]["rollouts"] > 0
    sizes = [row["groups/size_mean"] for row in metrics(config) if "loss" in row]
    assert len(sizes) == 4
    assert all(2 <= size <= 4 for size in sizes)


def test_drafts_go_along_with_jobs(config: dict[str, Any]) -> None:
    """Also over a resume: the checkpoint has the drafts. Next to a run without any, as other work varies."""
    config |= REPEATING | {"filter": "keep_all"}
    config |= {"env": {"name": "countdown", "train_size": 6, "test_size": 8}}
    shares = []
    for drafts in (False, True):
        own = config | {"speculative": drafts, "output_dir": f"{config['output_dir']}-{drafts}"}
        Trainer(config=own | {"max_steps": 3}).train()
        Trainer.resume(own["output_dir"], {"max_steps": 6}).train()
        assert_clean(own)
        before, *_, last = (row for row in metrics(own)[2:] if "num_decoded_tokens" in row)
        later = {key: last[key] - before[key] for key in ("num_decoded_tokens", "num_tokens")}
        shares.append(later["num_decoded_tokens"] / later["num_tokens"])
    assert shares[1] < 0.9 * shares[0]


@pytest.mark.slow
def test_both_samplers_say_how_they_do(config: dict[str, Any]) -> None:
    """In one step or another: where a sampler has not reported since the last one, some figures are missing."""
    endless = {"max_steps": 100_000, "max_skipped_steps": 100_000, "save_steps": 100_000, "eval_steps": None}
    trainer, found = Trainer(config=config | endless), dict[int, dict[str, float]]()

    def look() -> None:
        deadline = time.monotonic() + 120
        try:
            while len(found) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
                for row in metrics_so_far(Path(config["output_dir"])):
                    for slot in range(2):
                        own = {name: row[key] for name in FIGURES if (key := f"sampler/{slot}/{name}") in row}
                        if len(own) == len(FIGURES) and own["groups"]:
                            found[slot] = own
        finally:
            trainer.stop()

    looker = threading.Thread(target=look)
    looker.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    looker.join()
    assert found.keys() == {0, 1}
    for own in found.values():
        assert 0 <= own["idle"] <= 1
        assert own["lag"] >= 0
        assert own["memory_mib"] > 100
        assert own["tokens_per_s"] > 0


@pytest.mark.slow
def test_actors_that_are_killed_are_replaced(config: dict[str, Any]) -> None:
    """What they were working on is launched once more, and the run ends as if nothing had been."""
    config |= {"max_steps": 40, "eval_steps": None, "save_steps": 100}
    trainer = Trainer(config=config)
    over, killed = threading.Event(), []

    def kill() -> None:
        while not over.wait(6) and len(killed) < 3:
            if there := actors():
                killed.append(there[0].pid)
                there[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    trainer.train()
    over.set()
    killer.join()
    assert killed
    assert_clean(config)
    rows = [row for row in metrics(config) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert sum(row["sampler/restarts"] for row in rows) >= 1
    assert all(row["sampler/restarts"] == sum(row[f"sampler/{slot}/restarts"] for slot in range(2)) for row in rows)
    assert max(row.get("lag/max", 0) for row in rows) <= 1
    deadline = time.monotonic() + 20
    while actors() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not actors(), "nobody is left"


@pytest.mark.slow
def test_a_rule_that_fails_at_an_actor_ends_the_run_by_its_name(config: dict[str, Any]) -> None:
    gate = {"name": "tests.gates:Broken", "at": 2}
    with pytest.raises(RunStoppedError, match=r"gate Broken: ZeroDivisionError: division by zero"):
        Trainer(config=config | {"gates": [gate], "eval_steps": None}).train()


@pytest.mark.slow
def test_an_actor_that_keeps_dying_is_named_with_its_last_words(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    trainer = Trainer(config=config | {"reward_funcs": [f"{tmp_path}/dies.py:reward"], "eval_steps": None})
    (tmp_path / "dies.py").write_text("raise MemoryError('no room for the reward')\n")
    with pytest.raises((RunStoppedError, ConfigError), match="no room for the reward"):
        trainer.train()


def test_a_cluster_that_is_too_small_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sync: 40 samplers need 40 CPUs and 0 GPUs, and the cluster has 8 CPUs"):
        Trainer(config=config | {"sync": {"name": "ray", "samplers": 40}})
    with pytest.raises(ConfigError, match="need 2 CPUs and 2 GPUs, and the cluster has 8 CPUs and 0 GPUs"):
        Trainer(config=config | {"sync": {"name": "ray", "samplers": 2, "num_gpus": 1}})
    both = {"sync": {"name": "ray", "samplers": 2, "threads": 2}, "learner": {"name": "fsdp", "ranks": 2, "threads": 3}}
    needs = "sync and learner: 2 samplers need 4 CPUs and 0 GPUs, 2 ranks need 6 CPUs and 0 GPUs, and the cluster has 8"
    with pytest.raises(ConfigError, match=needs):
        Trainer(config=config | both)
    file = Path(config["output_dir"]).with_name("both.yaml")
    file.write_text(yaml.safe_dump(config | both), encoding="utf-8")
    assert CliRunner().invoke(app, ["train", str(file), "--dry-run"]).exit_code == 1


def test_what_other_work_holds_is_waited_for_and_named(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "FREE_S", 3.0)
    other = ray.remote(lambda: time.sleep(600)).options(num_cpus=7).remote()
    wait_for(lambda: ray.available_resources().get("CPU", 0) <= 1)
    with pytest.raises(ConfigError, match=r"2 samplers need 2 CPUs .*, but other jobs of the cluster leave 1 CPUs"):
        Trainer(config=config)
    ray.cancel(other, force=True)
    monkeypatch.setattr(preflight, "FREE_S", 60.0)
    Trainer(config=config).close()


def test_variables_of_the_driver_reach_samplers(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not set when the cluster started."""
    for name in ("JUDGE_KEY", "HF_HOME", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "there")
    Trainer(config=config | {"reward_env": ["JUDGE_KEY"], "max_steps": 1, "eval_steps": None}).train()
    assert_clean(config)
    channel = sampler_ray.ActorChannel(
        queue.SimpleQueue(), sampler_ray.Ray(num_gpus=0), cluster.private_environment(["JUDGE_KEY"]), "winnow.run.serve"
    )
    try:
        seen = channel._actor.__ray_call__.remote(lambda self: dict(os.environ))
        names = ("JUDGE_KEY", "HF_HOME", "HTTPS_PROXY", "OMP_NUM_THREADS")
        assert [ray.get(seen, timeout=120)[name] for name in names] == ["there", "there", "there", "1"]
    finally:
        channel.kill()
