"""The oracle `examples/one_file.py`, and a tiny model that both sides train."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from winnow.study.warm_start import WarmStartConfig, small_model, word_tokenizer

ROOT = Path(__file__).parents[2]


def rms_norm(self: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file", ROOT / "examples" / "one_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    words = ["numbers", "target", ":", ",", "=", "+", "-", "*", "/", *map(str, range(100))]
    return word_tokenizer(words, max_positions=64)


@pytest.fixture(scope="session")
def make_model(tokenizer: Any) -> Callable[[], Any]:
    """A float64 model of 2 layers and hidden size 32, the same one at each call; its output is far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = WarmStartConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
        model = small_model(tokenizer, sizes).double().eval()
        model.set_attn_implementation("sdpa")  # the eager one has its softmax in float32 whatever the model's type
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):  # so has the norm
                module.forward = MethodType(rms_norm, module)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6)
    return lambda: copy.deepcopy(model)
