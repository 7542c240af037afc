"""vLLM's share of a GPU, by what else is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from winnow.run import resolved as resolved_module
from winnow.run.budget import GIB, MOST_OF_VLLM, Budget, Gpus, Shapes
from winnow.run.plan import plan_for

from ..builders.budgets import config, qwen3, shell
from ..builders.resolving import budget


@pytest.fixture(autouse=True)
def vllm_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_module, "find_spec", lambda name: name)


def of_8b(tmp_path: Path, **changes: Any) -> Any:
    lengths = {"max_prompt_length": 512, "max_completion_length": 1024, "prompts_per_step": 32, "num_generations": 8}
    return config(model=shell(tmp_path, "8B"), dtype="auto", lora={"r": 16}, **lengths, **changes)


def test_one_that_sleeps_takes_what_generation_leaves(tmp_path: Path) -> None:
    """0.3 of 80 GiB would leave 6 GiB for keys and values of 256 sequences, and half of the card idle."""
    engines = {}
    for sleep in (True, False):
        found = plan_for(of_8b(tmp_path, engine={"name": "vllm", "sleep": sleep}), Gpus.from_text("80GiB"))
        engines[sleep] = found["engine"].get("gpu_memory_utilization", 0.3)
        assert max(sum(held.values()) for held in found["memory_gib"]["GPU"].values()) < 80
    assert 0.5 < engines[True] < 0.9
    assert engines[False] < 0.4
    given = plan_for(of_8b(tmp_path, engine={"name": "vllm", "gpu_memory_utilization": 0.35}), Gpus.from_text("80GiB"))
    assert given["engine"]["gpu_memory_utilization"] == 0.35


def of_vllm(memory: int = 24 * GIB, *, learner: bool = True, **changes: Any) -> Budget:
    sleep = {"sleep": False} | changes.pop("options", {})
    c = config(engine={"name": "vllm"} | sleep, **changes)
    return budget(c, Shapes.from_model(qwen3(), None), memory, learner=learner)


def held(some: Budget) -> int:
    return some.phases()["generation"]["vLLM (gpu_memory_utilization)"]


def test_its_share_is_of_the_whole_gpu(tmp_path: Path) -> None:
    """The learner's free memory is less than that where another process has some."""
    busy = replace(of_vllm(40 * GIB), total=80 * GIB)
    assert held(busy) == int(0.3 * 80 * GIB)
    assert held(of_vllm(40 * GIB)) == int(0.3 * 40 * GIB)


def test_each_sampler_on_a_gpu_counts() -> None:
    one = of_vllm()
    assert held(replace(one, samplers=3)) == 3 * held(one)
    local = budget(config(), Shapes.from_model(qwen3(), None), 24 * GIB)
    for part, size in local.phases()["generation"].items():
        times = 1 if part in ("weights", "optimizer") else 2
        assert replace(local, samplers=2).phases()["generation"][part] == times * size


def test_what_it_needs_is_cut_among_its_gpus() -> None:
    whole = of_vllm(max_completion_length=4096)
    cut = of_vllm(max_completion_length=4096, options={"tensor_parallel_size": 2})
    weights_and_keys = 2 * (whole._least_of_vllm() - cut._least_of_vllm())
    assert weights_and_keys > 4 * whole.shapes.parameters
    tiny = replace(whole, memory=whole._least_of_vllm() // 2)
    assert tiny.fitted()[1]["engine"]["gpu_memory_utilization"] == MOST_OF_VLLM


def test_samplers_of_one_gpu_share_it_in_a_plan(tmp_path: Path) -> None:
    """Each takes its part of 0.9; counted twice they would need 1.8 of the card."""
    sync = {"name": "processes", "samplers": 2, "devices": ["cuda:1"]}
    found = plan_for(of_8b(tmp_path, engine="vllm", sync=sync, max_lag=1), Gpus.from_text("2x80GiB"))
    held = found["memory_gib"]["sampler GPU"]["generation"]
    assert sum(held.values()) == pytest.approx(0.9 * 80, abs=0.5)


def test_a_sampler_on_the_learners_gpu_counts_there_in_a_plan(tmp_path: Path) -> None:
    """Others are on the second GPU, which they have to themselves."""
    sync = {"name": "processes", "samplers": 3, "devices": ["cuda:1", "cuda:0", "cuda:1"]}
    found = plan_for(of_8b(tmp_path, engine="vllm", sync=sync, max_lag=1), Gpus.from_text("2x80GiB"))["memory_gib"]
    held = {name: phases["generation"]["vLLM (gpu_memory_utilization)"] for name, phases in found.items()}
    assert held == {"learner GPU": pytest.approx(0.3 * 80, abs=0.5), "sampler GPU": pytest.approx(0.9 * 80, abs=0.5)}
    assert max(sum(parts.values()) for parts in found["learner GPU"].values()) < 80
    sync |= {"samplers": 1, "devices": ["cuda"]}
    alone = plan_for(of_8b(tmp_path, engine="vllm", sync=sync, max_lag=1), Gpus.from_text("80GiB"))
    assert list(alone["memory_gib"]) == ["learner GPU"]
