"""What vLLM is asked for, by where it runs; vLLM itself is not needed for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from winnow.base.errors import ConfigError
from winnow.config import RunConfig, validate
from winnow.engine.vllm.options import VllmOptions
from winnow.run.resolve import engine_for_run
from winnow.run.resolved import Options


def of_run(c: RunConfig) -> Any:
    return engine_for_run(c, Options.from_config(c))


PROCESSES = {"name": "processes", "samplers": 2}


@pytest.mark.parametrize(
    ("sync", "alone", "share", "sleep"),
    [
        ("in_process", False, 0.3, True),
        ("in_process", True, 0.9, False),
        (PROCESSES, False, 0.15, False),
        (PROCESSES | {"devices": ["cuda:1"]}, False, 0.9, False),
        ({"name": "ray", "num_gpus": 1.0}, False, 0.9, False),
        ({"name": "ray", "num_gpus": 0.5}, False, 0.45, False),
    ],
)
def test_a_share_of_the_gpu_and_sleep_by_who_else_is_there(sync: Any, alone: bool, share: float, sleep: bool) -> None:
    c = validate({"model": "m", "env": "countdown", "engine": "vllm", "sync": sync, "max_lag": 1})
    options = engine_for_run(c, Options.from_config(c), alone=alone)
    assert options.gpu_memory_utilization == pytest.approx(share)
    assert options.sleep is sleep
    assert options.max_length == c.max_prompt_length + c.max_completion_length


def test_what_is_given_stays() -> None:
    given = {"name": "vllm", "gpu_memory_utilization": 0.5, "sleep": False, "max_length": 77}
    options = of_run(validate({"model": "m", "env": "countdown", "engine": given}))
    assert (options.gpu_memory_utilization, options.sleep, options.max_length) == (0.5, False, 77)
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
