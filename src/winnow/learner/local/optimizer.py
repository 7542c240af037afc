"""AdamW, with states of 32, 8 or 4 bits, and how its state is saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...base.install import install

Parameters = Mapping[str, torch.nn.Parameter]
"""Trained parameters by name."""
LOW_BIT = {"adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW4bit"}
"""Names as in transformers -> torchao's classes: states in blocks of 256 or 128 numbers with a scale each."""


def adamw(name: str, parameters: Iterable[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """`name` is a value of `optim`. Raises ValueError when its library is missing."""
    if name not in LOW_BIT:
        return torch.optim.AdamW(parameters, lr=0.0, fused=True, **options)
    try:
        from torchao import optim
    except ImportError:
        raise ValueError(f"optim: {name} needs torchao; {install('torchao')}") from None
    made: torch.optim.Optimizer = getattr(optim, LOW_BIT[name])(parameters, lr=0.0, **options)
    return made


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """torchao's is a tensor, so that its compiled step stays as it is."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def saved_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, torch.Tensor]:
    """Plain tensors: `parameter:key`, or `parameter:key.part` of a state of fewer bits."""
    found = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            for part, tensor in _parts(value).items():
                found[f"{name}:{key}{part}"] = tensor.detach().contiguous()
    return found


def load_state(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    state: Mapping[str, torch.Tensor],
    where: str,
) -> None:
    """Raises ValueError when the parameters, or their states' bits, are not this optimizer's."""
    names = {name.rpartition(":")[0] for name in state}
    if names and names != set(parameters):
        different = sorted(names ^ set(parameters))[:3]
        raise ValueError(f"{where}: not the optimizer of this model; differs in {different}")
    for name in names:
        parameter = parameters[name]
        own: dict[str, torch.Tensor] = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            buffer = _buffer(optimizer, parameter, key)
            for part, tensor in _parts(buffer).items():
                saved = state.get(f"{name}:{key}{part}")
                if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                    raise ValueError(f"{where}: its states are of another kind than this optim; differs in {name}")
                tensor.copy_(saved)
            own[key] = buffer
        optimizer.state[parameter] = own


def _parts(value: torch.Tensor) -> dict[str, torch.Tensor]:
    flatten = getattr(value, "__tensor_flatten__", None)
    return {"": value} if flatten is None else {f".{part}": getattr(value, part) for part in flatten()[0]}


def _buffer(optimizer: Any, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
    """An empty state, as the optimizer itself makes it before its first step."""
    if isinstance(optimizer, torch.optim.AdamW):
        return torch.zeros((), device=parameter.device) if key == "step" else torch.zeros_like(parameter)
    made: torch.Tensor = torch.zeros(()) if key == "step" else optimizer._new_buffer(parameter, key == "exp_avg")
    return made
