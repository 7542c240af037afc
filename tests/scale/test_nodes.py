"""A cluster of three nodes: what a run survives when a node goes, freezes, or the driver is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from winnow import Trainer
from winnow.base.cluster import node_name
from winnow.base.errors import ConfigError
from winnow.record.stop_conditions import RunStoppedError
from winnow.sampler import pool
from winnow.sampler.pool import SamplerPool
from winnow.study import doctor as cluster_check

from ..builders.nodes import (
    REWARD,
    assert_clean,
    cluster,  # noqa: F401
    config,  # noqa: F401
    more_steps,
    processes,
    ray,
    restarts,
    rows,
    train_while,
    wait_for,
)


def train_past(config: dict[str, Any], happens: Callable[[], None]) -> None:
    """Train; after two steps it happens, and once a sampler was replaced two more steps are the last."""

    def act(_: SamplerPool) -> None:
        more_steps(config)
        happens()
        wait_for(lambda: restarts(config) >= 1)
        more_steps(config)

    train_while(config, act)


def test_a_node_that_goes_with_its_samplers(config: dict[str, Any], cluster: Any) -> None:
    """Nobody says that it is gone: silence does. What was under way there is launched once more, elsewhere."""
    train_past(config, lambda: cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False))
    assert_clean(config)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [[1]], indirect=True)
def test_samplers_join_and_leave_with_their_nodes(config: dict[str, Any], cluster: Any) -> None:
    """It starts with the one that there is room for. One that waits for room does not hold up the others."""
    config["sync"] |= {"min_samplers": 1}

    def both_work() -> bool:
        return all(rows(config)[-1][f"sampler/{slot}/groups"] > 0 for slot in range(2))

    def change(_: SamplerPool) -> None:
        more_steps(config)
        first = cluster.worker_nodes.copy().pop()
        assert {row["sampler/ready"] for row in rows(config)} <= {0, 1}
        cluster.add_node(num_cpus=1)
        wait_for(both_work)
        cluster.remove_node(first, allow_graceful=False)
        wait_for(lambda: restarts(config) >= 1)
        steps = len(rows(config))
        more_steps(config, 3)
        assert {row["sampler/ready"] for row in rows(config)[steps : steps + 3]} <= {0, 1}
        cluster.add_node(num_cpus=1)
        wait_for(both_work)

    train_while(config, change)
    assert_clean(config)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [[1]], indirect=True)
def test_a_run_whose_samplers_find_no_place_stops(
    config: dict[str, Any], cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["sync"] |= {"min_samplers": 0}

    def remove() -> None:
        more_steps(config)
        monkeypatch.setattr(pool, "START_TIMEOUT_S", 20.0)
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)

    trainer = Trainer(config=config)
    threading.Thread(target=remove, daemon=True).start()
    with pytest.raises(RunStoppedError, match=r"only 0 of 2 samplers could be scheduled within 20 s \(1 required\)"):
        trainer.train()
    assert_clean(config)


@pytest.mark.slow
def test_a_sampler_that_freezes(config: dict[str, Any]) -> None:
    frozen: list[psutil.Process] = []

    def freeze() -> None:
        frozen.append(processes("SamplerActor")[0])
        frozen[0].suspend()

    train_past(config, freeze)
    assert_clean(config)
    wait_for(lambda: not frozen[0].is_running() or frozen[0].status() == psutil.STATUS_ZOMBIE, 30)


def node_of(sampler: psutil.Process) -> list[psutil.Process]:
    """All processes of a sampler's node."""
    raylet = sampler.parent()
    assert raylet is not None
    return [raylet, *raylet.children(recursive=True)]


@contextlib.contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.slow
def test_a_node_that_stops_for_a_moment_is_waited_for(config: dict[str, Any]) -> None:
    config |= {"sync": config["sync"] | {"timeout_s": 60}}

    def act(pool: SamplerPool) -> None:
        more_steps(config)
        with stopped(node_of(processes("SamplerActor")[0])):
            time.sleep(8)
        more_steps(config, 4)

    train_while(config, act)
    assert_clean(config)
    assert restarts(config) == 0


@pytest.mark.slow
def test_a_node_that_stops_for_long_is_done_without(config: dict[str, Any]) -> None:
    """Its samplers are replaced; when it goes on, what they still say is of no account."""

    def act(pool: SamplerPool) -> None:
        more_steps(config)
        with stopped(node_of(processes("SamplerActor")[0])):
            wait_for(lambda: restarts(config) >= 1, 300)
            more_steps(config)
        more_steps(config, 4)

    train_while(config, act)
    assert_clean(config)
    wait_for(lambda: not processes("SamplerActor"), 30)


@pytest.mark.slow
def test_a_node_that_goes_with_a_rank(config: dict[str, Any], cluster: Any) -> None:
    """The run ends with the rank's name, and goes on with the ranks that there is room for."""
    learner = {"name": "fsdp", "ranks": 4, "timeout_s": 60, "ray_address": cluster.address}
    config |= {"learner": learner, "sync": config["sync"] | {"samplers": 1}, "save_steps": 1}
    trainer = Trainer(config=config)

    def remove() -> None:
        wait_for(lambda: len(rows(config)) >= 2)
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)

    threading.Thread(target=remove, daemon=True).start()
    with pytest.raises(RunStoppedError, match=r"learner: rank \d.* (failed|said nothing)(.|\n)*winnow resume"):
        trainer.train()
    steps = len(rows(config))
    fewer = {"max_steps": steps + 1, "learner": learner | {"ranks": 1}}
    Trainer.resume(config["output_dir"], fewer).train()
    assert_clean(config)


DRIVER = """
import json, sys
from winnow import Trainer
config = json.loads(sys.argv[1])
Trainer(config=config).train()
"""


@pytest.mark.slow
def test_a_driver_that_is_killed(config: dict[str, Any], cluster: Any) -> None:
    """Its actors end with it, and the run goes on from its last checkpoint: on the same cluster, then on a new one."""
    config |= {"save_steps": 2}
    paths = os.pathsep.join(path for path in sys.path if path)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(config)], env=os.environ | {"PYTHONPATH": paths}
    )
    wait_for(lambda: len(rows(config)) >= 3, 240)
    assert processes("SamplerActor")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_for(lambda: not processes("SamplerActor"), 60)
    steps = len(rows(config))
    Trainer.resume(config["output_dir"], {"max_steps": steps + 2}).train()
    assert_clean(config)
    ray.shutdown()
    sync = config["sync"] | {"ray_address": "local"}
    Trainer.resume(config["output_dir"], {"max_steps": steps + 4, "sync": sync}).train()
    assert_clean(config)
    assert len(rows(config)) == steps + 4


def test_every_node_is_tried(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.init(address=cluster.address, log_to_driver=False)
    found = cluster_check.check(None, tmp_path)
    assert found["problems"] == []
    assert sorted(node["cpus"] for node in found["nodes"]) == [0.0, 3.0, 3.0]
    assert list(tmp_path.iterdir()) == []
    mine = cluster_check.versions()
    monkeypatch.setattr(cluster_check, "versions", lambda: mine | {"torch": "1.0"})
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    monkeypatch.setattr(cluster_check.Probe, "share", lambda self, path, token, mine: "")  # a directory of its own
    problems = cluster_check.check(None, blocked)["problems"]
    assert len(problems) == 6
    assert sum(f"torch is {mine['torch']}, and 1.0 here" in problem for problem in problems) == 3
    assert sum("not visible here" in problem for problem in problems) == 3


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_named(cluster: Any) -> None:
    ray.init(address=cluster.address, log_to_driver=False)
    silent = cluster.worker_nodes.copy().pop()
    raylet = psutil.Process(silent.all_processes["raylet"][0].process.pid)
    (name,) = (node_name(node) for node in ray.nodes() if node["NodeID"] == silent.node_id)
    raylet.suspend()
    try:
        found = cluster_check.check(None, None, node_s=30)
    finally:
        raylet.resume()
    assert len(found["nodes"]) == 3
    (problem,) = (problem for problem in found["problems"] if name in problem)
    # Ray may give the node up before the check does
    assert problem in (f"{name}: no answer within 30 s", f"{name}: its node or process ended before it answered")


def test_an_address_where_nobody_answers(tiny_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sync: ray_address=127.0.0.1:1: no answer"):
        Trainer(config=tiny_config | {"sync": {"name": "ray", "ray_address": "127.0.0.1:1"}, "reward_funcs": [REWARD]})
