"""Small real things that tests share: a two-layer Qwen2 with a word tokenizer, and a short Countdown task."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter, deque
from collections.abc import Generator, Iterator
from contextlib import nullcontext
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
from winnow.run import trainer
from winnow.sampler import processes

LONG = tuple(f"tests/{name}/" for name in ("pairs", "e2e", "faults", "golden", "page"))
"""Folders whose tests take seconds each."""

gc.disable()  # until the tests are collected; see `pytest_collection_finish`
torch.set_num_threads(1)
hypothesis.settings.register_profile("winnow", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("winnow")


def pytest_collection_finish() -> None:
    """Keep the collector off a million objects of imported libraries, which last as long as the process."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of cases that repeat one code path some are fast, see `cases`; what is exhaustive is slow, too.

    The longest files come first, else the last of them would keep one core busy while the others are idle.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
        cases = item.get_closest_marker("cases")
        if not cases or item.get_closest_marker("slow"):
            continue
        function = item.nodeid.partition("[")[0]
        if seen[function] % cases.kwargs["one_in"]:
            item.add_marker(pytest.mark.slow)
        seen[function] += 1
    if hasattr(config, "workerinput"):
        items[:] = dealt(items, config.workerinput["workercount"])


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order items so that each worker, who begins with an equal share of the list, begins with long files."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    long_first = sorted(files, key=lambda name: not name.startswith(LONG))
    return [item for worker in range(workers) for name in long_first[worker::workers] for item in files[name]]


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
        patch.setattr(os, "fsync", lambda fd: None)  # no test cuts the power: tests/faults/test_power_cut.py records
        patch.setattr(trainer, "heap_frozen", nullcontext)  # the heap is, and to look counts half a million objects
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


@pytest.fixture
def no_garbage() -> None:
    """For tests that recurse to the limit: what other tests left would be finalized there, without room to say so."""
    gc.collect()


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
