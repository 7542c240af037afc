"""`resolve` of random configurations: it decides everything, touches nothing, and decides the same again."""

from __future__ import annotations

import builtins
import io
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from winnow.base.errors import ConfigError
from winnow.config import RunConfig, validate
from winnow.engine.initial_model import InitialModel
from winnow.run.resolve import resolve
from winnow.run.resolved import Machine, Options

from .variants import PROFILE, together, variants

CONFIGURATIONS = 2_000
GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MACHINES = [
    Machine(CPU, threads=1, memory=2 * GIB),
    Machine(CPU, threads=64, memory=256 * GIB, bfloat16_units=["amx_bf16"]),
    Machine(CUDA, threads=8, memory=64 * GIB, gpu_memory=24 * GIB, gpu_bfloat16=True),
    Machine(CUDA, threads=8, memory=64 * GIB, gpu_memory=80 * GIB, gpu_bfloat16=True, no_vllm="pip"),
    Machine(CUDA, threads=8, memory=64 * GIB, gpu_memory=16 * GIB),
    Machine(CUDA, threads=8, memory=64 * GIB, gpu_memory=80 * GIB, gpu_bfloat16=True, planned_gpus=2),
]
PLACES = [
    {},
    {"sync": {"name": "processes", "samplers": 2}, "max_lag": 2},
    {"sync": {"name": "processes", "samplers": 2, "devices": ["cuda:1"]}, "max_lag": 2},
    {"sync": {"name": "ray", "samplers": 4, "num_gpus": 0.5}, "max_lag": 2},
    {"learner": {"name": "fsdp", "ranks": 4, "fsdp_size": 2}},
    {"engine": "vllm"},
    {"engine": {"name": "vllm", "gpu_memory_utilization": 0.5}},
    {"engine": {"name": "auto", "slots": 8}},
    {"tokens_per_microbatch": 1_000, "gradient_checkpointing": True},
    {"max_completion_length": 30_000},
    {"dtype": "float32"},
]


def model(layers: int, width: int) -> InitialModel:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, num_attention_heads=8, **sizes))
    return InitialModel("m", meta_model=made, dtypes={"*": "bfloat16"})


def configurations() -> Iterator[RunConfig]:
    """Valid ones: a place where it runs, and up to three settings at once, each with what it needs."""
    draw, known = random.Random(0), [v for v in variants() if PROFILE not in str(v.settings)]
    count = 0
    while count < CONFIGURATIONS:
        settings = together(*draw.sample(known, draw.randrange(4))) | draw.choice(PLACES)
        try:
            yield validate({"model": "m", "env": "countdown"} | settings)
        except ConfigError:  # two settings that contradict each other
            continue
        count += 1


@contextmanager
def nothing_reachable() -> Iterator[None]:
    """Fail whatever reaches for a file, the network or a device."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"resolve reached outside: {args} {kwargs}")

    with pytest.MonkeyPatch.context() as patch:
        for module, names in (
            (builtins, ("open",)),
            (io, ("open",)),
            (os, ("open", "stat", "listdir", "scandir", "mkdir")),
            (socket, ("socket", "create_connection")),
            (torch.cuda, ("is_available", "mem_get_info", "get_device_properties", "device_count", "_lazy_init")),
        ):
            for name in names:
                patch.setattr(module, name, refuse)
        yield


def test_resolve_touches_nothing_and_repeats_itself() -> None:
    draw, models = random.Random(1), [model(1, 64), model(4, 1024)]
    refused: list[str] = []
    devices = set()
    for c in configurations():
        options, machine, initial = Options.from_config(c), draw.choice(MACHINES), draw.choice(models)
        alone = draw.random() < 0.1
        with nothing_reachable():
            try:
                r = resolve(c, options, machine, initial, alone=alone)
            except ConfigError as error:  # it does not fit on the GPU, or options of `sync` do nothing or cannot work
                refused.append(str(error))
                continue
            again = resolve(c, Options.from_config(c), machine, initial, alone=alone)
        assert r == again
        sizes = () if alone else (r.config.tokens_per_microbatch, r.config.gradient_checkpointing)
        assert "auto" not in (r.config.dtype, r.config.threads, r.config.engine, *sizes)
        assert bool(r.budgets) == (machine.device == CUDA)
        there = replace(machine, threads=3, no_vllm="pip")
        kept = resolve(r.config, r.options, there, initial, resumed=True, alone=alone)
        assert kept.config == r.config, "a resume decides nothing anew"
        devices.add((machine.device.type, r.config.dtype))
    expected = ("device: the", "sync: ", "rollout_batch: has no effect with sync: ", "reuse: ", "lora: merge: ")
    assert all(error.startswith(expected) for error in refused), refused
    assert len(refused) < CONFIGURATIONS / 2
    assert {("cpu", "bfloat16"), ("cpu", "float32"), ("cuda", "bfloat16"), ("cuda", "float32")} <= devices
