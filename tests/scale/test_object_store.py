"""Weights in an object store that is small for them: old ones are let go, what is too large goes over the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.base.weights import StateWeights
from winnow.record.ledger import Ledger
from winnow.sampler.ray import RayWeights, read_object
from winnow.study.warm_start import WarmStartConfig, warm_start
from winnow.tasks.countdown import CountdownConfig

from .. import parity
from ..builders.runs import metrics_of

ray = pytest.importorskip("ray")
from ray._private.internal_api import memory_summary  # noqa: E402

STORE = 80 * 2**20
"""The least that Ray takes, about."""


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[None]:
    """A cluster with such a store; a test may set more of Ray's own configuration."""
    more = getattr(request, "param", {})
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init("local", num_cpus=3, object_store_memory=STORE, _system_config=more, **quiet)
    yield
    ray.shutdown()


def weights(mib: int, value: float) -> StateWeights:
    return StateWeights({"w": torch.full((mib * 2**18,), value)})


def read(told: dict[str, Any]) -> float:
    return float(read_object(told)["w"][-1])


def spilled() -> bool:
    return "Spilled" in memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)


def test_versions_that_nobody_reads_any_more_leave_the_store(store: None) -> None:
    reader, published = ray.remote(read), RayWeights()
    for version in range(24):
        published.write(weights(8, version), version)
        assert ray.get(reader.remote(published.message()), timeout=180) == version
    assert not spilled(), "nine fit: the newest, and those that are just being let go"


def test_weights_larger_than_the_store_arrive(store: None) -> None:
    published = RayWeights()
    for version in range(2):
        published.write(weights(200, version), version)
        assert ray.get(ray.remote(read).remote(published.message()), timeout=120) == version


@pytest.mark.parametrize("store", [{"local_fs_capacity_threshold": 0.0}], indirect=True)
def test_where_the_disk_is_full_too_the_error_says_what_to_raise(store: None) -> None:
    published = RayWeights()
    with pytest.raises(ConfigError, match=r"the weights \(200 MiB\) fit neither(.|\n)*object-store-memory"):
        published.write(weights(200, 1.0), 1)
    assert published.message()["version"] == -1


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 MiB of weights: two of them fit into the store, three do not."""
    path = tmp_path_factory.mktemp("models") / "large"
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 4096, "num_layers": 2, "num_heads": 4}
    config = WarmStartConfig(max_steps=2, batch_size=4, warmup_steps=1, **sizes)
    warm_start(CountdownConfig(train_size=16, test_size=8).build(), path, config=config)
    return path


@pytest.mark.slow
def test_a_run_keeps_no_old_weights(store: None, tiny_config: dict[str, Any], large_model: Path) -> None:
    sync = {"name": "ray", "samplers": 2}
    config = tiny_config | {"model": str(large_model), "sync": sync, "max_lag": 1, "correction": "truncate"}
    config |= {"reward_funcs": [f"{parity.__file__}:parity_reward"], "eval_steps": None, "max_steps": 8}
    Trainer(config=config).train()
    assert not spilled(), "the newest, and the one before it as long as it is read"
    run = Path(config["output_dir"])
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
    assert len(metrics_of(run)) == 8
