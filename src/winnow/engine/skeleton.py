"""Causal LMs whose weights stay in their files until ranks have sharded the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from ..base.weights import LazyState, state_once, tied_names
from .loading import load_model_config, require_whole, set_generation_config

TRIAL_VOCABULARY = 256


def unloaded(folder: Path) -> Any | None:
    """Return a directory's model in float32, with parameters on the meta device and computed buffers.

    None if the files do not hold all weights under the model's names, or its class has several parts. Raises
    ConfigError as `load_whole` does.
    """
    require_whole(folder)
    config = load_model_config(folder)
    if config.get_text_config() is not config:
        return None
    try:
        held = _held(folder)
        with torch.random.fork_rng(devices=[]), _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    except Exception:  # the loader runs next and reports any error
        return None
    set_generation_config(model, folder)
    for name, tensor in state_once(model).items():
        if name not in held or held[name][1] != tuple(tensor.shape):
            return None
    return model


def in_files(model: Any, folder: Path) -> LazyState:
    """Return the state dict of an unloaded model; each lookup reads a tensor from its file."""
    tied, held = tied_names(model), _held(folder)

    def read(name: str) -> torch.Tensor:
        saved = tied.get(name, name)
        file, _ = held[saved]
        with safe_open(file, framework="pt") as tensors:
            return cast(torch.Tensor, tensors.get_tensor(saved)).float()

    return LazyState(model.state_dict(), read)


@contextmanager
def as_zeros(model: Any) -> Iterator[None]:
    """Make an unloaded model's parameters memory-free zeros on the CPU: peft puts adapters on the weights' device, and
    on the meta device they would have no values. Adapters remain afterwards."""
    meta = list(model.parameters())
    zeros = [nn.Parameter(torch.zeros(()).expand(p.shape)) for p in meta]
    _exchange(model, meta, zeros)
    try:
        yield
    finally:
        _exchange(model, zeros, [p.requires_grad_(z.requires_grad) for p, z in zip(meta, zeros, strict=True)])


def _exchange(model: nn.Module, old: list[nn.Parameter], new: list[nn.Parameter]) -> None:
    by_old = {id(one): other for one, other in zip(old, new, strict=True)}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = by_old.get(id(parameter), parameter)


def _held(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of each tensor."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = file, tuple(tensors.get_slice(name).get_shape())
    return found


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create modules inside with parameters on the meta device, before any of their values are written."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied parameter stays the same object
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


def for_trials(model: Any, n_tokens: int, device: torch.device) -> tuple[Any, int]:
    """Return a model for trials of faster code paths, and its number of ids.

    It is a random model of the same class if this one has no weights yet, or some in bfloat16, with the fewest layers
    and tokens that show its behaviour.
    """
    if not any(p.is_meta or p.dtype == torch.bfloat16 for p in model.parameters()):
        return model, n_tokens
    config = copy.deepcopy(model.config)
    kinds = getattr(config, "layer_types", None) or []
    layers = max([2, *(kinds.index(kind) + 1 for kind in kinds)])
    config.num_hidden_layers = min(config.num_hidden_layers, layers)
    if kinds:
        config.layer_types = kinds[: config.num_hidden_layers]
    config.vocab_size, config.pad_token_id = min(config.vocab_size, TRIAL_VOCABULARY), None
    with torch.random.fork_rng(devices=[]):
        made = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    return made.eval().to(device), min(n_tokens, config.vocab_size)
