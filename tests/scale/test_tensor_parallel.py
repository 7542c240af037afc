"""vLLM cut into two processes, one of which ends; what it samples is tested with the engine of one process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from winnow import Trainer
from winnow.base.errors import ConfigError
from winnow.engine import ModelReference
from winnow.engine.vllm.options import VllmOptions
from winnow.record.ledger import Ledger

from .. import parity
from ..builders.vllm import SMALL_CACHE, WIDE, build, requests
from ..builders.vllm_lora import Parts, assert_adapters_change_between_steps
from ..builders.vllm_runs import EVERYTHING, VLLM
from ..unit.engine_models import make_model, word_tokenizer

pytest.importorskip("vllm")

STUCK = """
import os, signal, sys, time
import psutil
from pathlib import Path
from tests.builders.vllm import build, requests
engine, _ = build("qwen2-tied", Path(sys.argv[1]), tensor_parallel_size=2)
other = psutil.Process().children()[0]
engine.submit(requests())
engine.step()
other.suspend()
if os.fork() == 0:
    time.sleep(1)
    other.kill()
    os._exit(0)
engine.step()
print("went on")
"""


def followers() -> list[psutil.Process]:
    """Of this process's engines and of its samplers'."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone, or not yet buried
            if "winnow.engine.vllm.core" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_an_engine_whose_other_rank_has_ended_says_so(tmp_path: Path) -> None:
    """And leaves no process and no address of its own behind; the next engine of this process starts."""
    engine, _ = build("qwen2-tied", tmp_path, tensor_parallel_size=2)
    (other,) = followers()
    other.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while followers() and time.monotonic() < deadline:
        time.sleep(0.05)
    engine.submit(requests()[:2])
    with pytest.raises(RuntimeError, match="rank 1 of vLLM's tensor parallelism ended with exit status -9"):
        engine.step()
    with pytest.raises(RuntimeError, match="the engine failed earlier"):
        engine.step()
    engine.close()
    assert not other.is_running()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} & set(os.environ)
    again, _ = build("qwen2-tied", tmp_path, tensor_parallel_size=2)
    again.close()


@pytest.mark.slow
def test_a_rank_that_ends_in_the_middle_of_a_step_leaves_nobody_waiting(tmp_path: Path) -> None:
    """The engine's process waits for it in a collective, where no exception reaches it."""
    done = subprocess.run([sys.executable, "-c", STUCK, str(tmp_path)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "rank 1 of vLLM's tensor parallelism ended with exit status -9" in done.stderr
    assert "went on" not in done.stdout


def test_a_model_that_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    model, tokenizer = make_model("qwen2-tied", **WIDE), word_tokenizer()
    model.save_pretrained(tmp_path)
    options = VllmOptions(slots=8, max_length=128, tensor_parallel_size=3, args=SMALL_CACHE)
    with pytest.raises(ConfigError, match=f"vLLM cannot run '{tmp_path}'"):
        options.build(ModelReference(str(tmp_path), torch.device("cpu")), tokenizer)
    assert followers() == []


@pytest.mark.slow
def test_adapters_alone_over_two_ranks(tmp_path: Path) -> None:
    """A head with one, too; ranks get them from the first, and each takes its part."""
    parts = Parts("qwen3", tmp_path, ranks=2)
    try:
        assert_adapters_change_between_steps(parts)
    finally:
        parts.theirs.close()


@pytest.fixture
def config(tiny_config: dict[str, Any], wide_model: Path) -> dict[str, Any]:
    engine = VLLM | {"tensor_parallel_size": 2}
    reward = {"reward_funcs": [f"{parity.__file__}:parity_reward"]}
    methods = {key: value for key, value in EVERYTHING.items() if key != "rollout_batch"}  # samplers start groups alone
    return tiny_config | methods | reward | {"model": str(wide_model), "max_steps": 3, "engine": engine}


@pytest.mark.slow
@pytest.mark.usefixtures("local_cluster")
def test_a_sampler_over_two_ranks(config: dict[str, Any]) -> None:
    """With every method on; nothing of it is left."""
    Trainer(config=config | {"sync": {"name": "ray", "samplers": 1, "threads": 1}}).train()
    with Ledger.open(Path(config["output_dir"]) / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
        assert proof.ok, proof.problems
        assert ledger.totals()["trained"]["rollouts"] > 0
    deadline = time.monotonic() + 60
    while followers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert followers() == []


@pytest.mark.usefixtures("local_cluster")
def test_samplers_with_fewer_gpus_than_ranks_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sync: num_gpus: too few for engine: tensor_parallel_size \(1 of 2\)"):
        Trainer(config=config | {"sync": {"name": "ray", "num_gpus": 1}})
