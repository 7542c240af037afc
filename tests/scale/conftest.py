"""A cluster of a module's own, and a model whose heads are large enough for vLLM's attention on a CPU."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one to the home directory


@pytest.fixture(scope="module")
def local_cluster() -> Iterator[None]:
    """One for all tests of a module: it takes seconds to start."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: two layers of two heads of 32, one token a Countdown word, barely taught."""
    from winnow.study.warm_start import WarmStartConfig, warm_start
    from winnow.tasks.countdown import CountdownConfig

    path = tmp_path_factory.mktemp("models") / "wide"
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
    config = WarmStartConfig(max_steps=30, batch_size=32, warmup_steps=5, **sizes)
    warm_start(CountdownConfig(train_size=64, test_size=16).build(), path, config=config)
    return path


@pytest.fixture(scope="module")
def ranks(local_cluster: None) -> Iterator[Any]:
    """Two, for one model after the other: they take seconds to start."""
    from winnow.learner.fsdp.ranks import Ranks

    found = Ranks(world=2, threads=1, num_gpus=0, timeout_s=120)
    yield found
    found.close()
