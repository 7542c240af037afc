"""Build a Ray cluster on this machine and runs on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from winnow import Trainer
from winnow.record.ledger import Ledger
from winnow.sampler.pool import SamplerPool

from .. import parity
from .runs import metrics_so_far

ray = pytest.importorskip("ray")

REWARD = f"{parity.__file__}:parity_reward"


SILENCE_S = 6.0


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A head that nothing is placed on, and two nodes; or nodes of as many cores as the test says."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for cores in getattr(request, "param", [3, 3]):
        found.add_node(num_cpus=cores)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def config(tiny_config: dict[str, Any], cluster: Any) -> dict[str, Any]:
    sync = {"name": "ray", "samplers": 2, "timeout_s": SILENCE_S, "ray_address": cluster.address}
    more = {"max_lag": 1, "correction": "truncate", "reward_funcs": [REWARD], "reward_timeout_s": 2.0}
    endless = {"max_steps": 100_000, "max_skipped_steps": 100_000, "save_steps": 100_000}
    return tiny_config | more | endless | {"sync": sync, "eval_steps": None}


def rows(config: dict[str, Any]) -> list[dict[str, float]]:
    """Of steps; before the first there may be an evaluation."""
    return [row for row in metrics_so_far(Path(config["output_dir"])) if row["step"] > 0]


def assert_clean(config: dict[str, Any]) -> None:
    """Every step once, the bound held; what an interrupted run had in flight still waits for its resume."""
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems
        assert ledger.in_flight() == [] or not proof.finished
    assert [row["step"] for row in rows(config)] == list(range(1, len(rows(config)) + 1))
    assert all(row.get("lag/max", 0) <= 1 for row in rows(config))


def processes(kind: str) -> list[psutil.Process]:
    """Actors of a class, of this test's cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone, or not yet buried
            if f"ray::{kind}" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(condition: Callable[[], Any], timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to this"
        time.sleep(0.05)


def train_while(config: dict[str, Any], act: Callable[[SamplerPool], None]) -> None:
    """Train while something is done to the samplers; when it is over, stop."""
    trainer = Trainer(config=config)
    with ThreadPoolExecutor(1) as beside:  # nodes are added from the main thread
        run = beside.submit(trainer.train)
        try:
            act(trainer.sampler)  # type: ignore[arg-type]
        except AssertionError:
            if run.done():
                run.result()
            raise
        finally:
            trainer.stop()
        with pytest.raises(KeyboardInterrupt):
            run.result()


def more_steps(config: dict[str, Any], n: int = 2) -> None:
    before = len(rows(config))
    wait_for(lambda: len(rows(config)) >= before + n)


def restarts(config: dict[str, Any]) -> float:
    return sum(row["sampler/restarts"] for row in rows(config))
