"""Whole runs and their resumes on a GPU, pretended where there is none: nothing mixes devices or moves to the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretend_cuda import PretendCuda
from winnow.base.errors import ConfigError
from winnow.engine.local.cache import KVCache
from winnow.record.stop_conditions import OutOfMemoryError
from winnow.run.trainer import Trainer

from ..builders.runs import metrics_of

RUNS: dict[str, dict[str, Any]] = {
    "greso": {"selector": "greso", "filter": "zero_variance", "rollout_batch": "adaptive", "max_lag": 1},
    "dapo": {"filter": "zero_variance", "epsilon_high": 0.28},
    "arrol": {"gates": ["arrol"], "filter": "keep_all"},
    "active-adaptive-k": {
        "filter": {"name": "zero_variance", "refill": False},
        "group_size": {"name": "adaptive_k", "tau": 0.5, "window": 2},
        "advantage": "rloo",
        "policy_loss": "plain",
    },
    "lag-vcpo": {
        "max_lag": 2,
        "advantage": "opob",
        "step_scale": "ess",
        "policy_loss": "plain",
        "correction": {"name": "truncate", "level": "sequence", "high": 8},
    },
    "remax": {"advantage": "remax", "dtype": "float16"},
    "kl-reference": {"beta": 0.01, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "kl-lora": {"lora": {"r": 4}, "beta": 0.01, "dtype": "bfloat16", "policy_loss": "clip", "correction": "none"},
}
SMALL = {"prompts_per_step": 2, "max_completion_length": 6, "eval_steps": 1, "eval_prompts": 2, "eval_generations": 1}


def coin(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(sum(map(ord, str(text))) % 2) for text in completions]


@pytest.mark.cases(one_in=8)
@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_run_and_its_resume_stay_on_the_device(name: str, tiny_config: dict[str, Any]) -> None:
    """A step, saved and evaluated, and a second one by a resume."""
    values = tiny_config | SMALL | {"device": "cuda", "max_steps": 1} | RUNS[name]
    gpu = None if torch.cuda.is_available() else PretendCuda()
    with gpu or nullcontext():
        Trainer(config=values, reward_funcs=[coin]).train()
        resumed = Trainer.resume(values["output_dir"], {"max_steps": 2}, reward_funcs=[coin])
        resumed.train()
        assert all(tensor.is_cuda for tensor in resumed.learner.weights().state_dict().values())
    assert gpu is None or not gpu.mixed, gpu and gpu.report()
    lines = metrics_of(Path(values["output_dir"]))
    peaks = [line["gpu/peak_memory_gib"] for line in lines if "gpu/peak_memory_gib" in line]
    assert len(peaks) == 2
    assert all(peak > 0 for peak in peaks)


def test_steps_stay_on_the_device_and_none_holds_more_than_those_before(tiny_config: dict[str, Any]) -> None:
    """Each publish once kept 32 MiB on a GPU: a workspace of cuBLAS for the stream of its graphs."""
    values = tiny_config | SMALL | {"device": "cuda", "max_steps": 8, "eval_steps": None, "filter": "keep_all"}
    with nullcontext() if torch.cuda.is_available() else PretendCuda():
        Trainer(config=values, reward_funcs=[coin]).train()
    lines = metrics_of(Path(values["output_dir"]))
    held = [line["gpu/memory_gib"] for line in lines if "gpu/memory_gib" in line]
    assert len(held) == 8
    assert max(held[4:]) < max(held[:4]) + 0.016, held


def test_a_run_that_cannot_fit_is_refused_before_anything_is_written(tiny_config: dict[str, Any]) -> None:
    with PretendCuda(memory=1 << 20), pytest.raises(ConfigError, match=r"device: the \w+ phase needs .*lora: {r: 16}"):
        Trainer(config=tiny_config | {"device": "cuda"}, reward_funcs=[coin])
    assert not Path(tiny_config["output_dir"]).exists()


@pytest.mark.slow
def test_memory_that_ends_before_the_first_step_is_named_with_the_keys_and_a_resume_takes_them(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ..."
        )

    values = tiny_config | SMALL | {"device": "cuda", "max_steps": 1}
    with PretendCuda():
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "reserve", full)
            with pytest.raises(OutOfMemoryError, match=r"before the first step: out of memory: .*engine\.slots"):
                Trainer(config=values, reward_funcs=[coin])
        Trainer(config=values, reward_funcs=[coin]).train()
        changes = {"max_steps": 2, "engine": {"name": "local", "slots": 2}, "tokens_per_microbatch": 64}
        resumed = Trainer.resume(values["output_dir"], changes, reward_funcs=[coin])
        resumed.train()
        assert resumed.config.engine["slots"] == 2
