"""Small real things that tests share: a two-layer Qwen2 with a word tokenizer, and a short Countdown task."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())  # the package makes this folder when it is imported
if not os.access(os.path.expanduser("~"), os.W_OK):  # as with `make anywhere`
    os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="winnow-tests-hf-"))

import hypothesis
import pytest
import torch

from winnow.base.forkserver import ForkServer, forkserver
from winnow.sampler import processes

gc.disable()  # until the tests are collected; see `pytest_collection_finish`
torch.set_num_threads(1)
hypothesis.settings.register_profile("winnow", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("winnow")


def pytest_collection_finish() -> None:
    """Keep the collector off a million objects of imported libraries, which last as long as the process."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def imports_once() -> Iterator[None]:
    """Sampler processes of all runs come from the same server, as those of one run do: imports take seconds.

    The two last used, of 300 to 400 MB each: tests that change variables have one of their own.
    """
    kept: deque[ForkServer] = deque(maxlen=2)

    def kept_for_others(target: str, env: dict[str, str]) -> ForkServer:
        server = forkserver(target, env)
        if server in kept:
            kept.remove(server)
        kept.append(server)
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "forkserver", kept_for_others)
        yield
    kept.clear()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, None, None]:
    """The same environment in every test: it is what tells servers apart."""
    name = os.environ.pop("PYTEST_CURRENT_TEST")
    try:
        return (yield)
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = name


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: two layers, hidden 32, one token a Countdown word, barely taught."""
    from winnow.study.warm_start import WarmStartConfig, warm_start
    from winnow.tasks.countdown import CountdownConfig

    path = tmp_path_factory.mktemp("models") / "tiny"
    config = WarmStartConfig(
        max_steps=30, batch_size=32, warmup_steps=5, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2
    )
    warm_start(CountdownConfig(train_size=64, test_size=16).build(), path, config=config)
    return path


@pytest.fixture
def tiny_config(tiny_model: Path, tmp_path: Path) -> dict[str, object]:
    """A run of seconds: 4 prompts x 4 rollouts of up to 8 tokens."""
    return {
        "model": str(tiny_model),
        "env": {"name": "countdown", "train_size": 24, "test_size": 8},
        "output_dir": str(tmp_path / "run"),
        "threads": 1,
        "max_steps": 4,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_prompt_length": 16,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "save_total_limit": 20,
        "eval_steps": 2,
        "eval_prompts": 4,
        "eval_generations": 2,
    }
