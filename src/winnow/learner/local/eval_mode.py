"""Eval mode with gradients: the mode of the learner's model.

The engine samples in eval mode, and the update must train that policy. Train mode enables more than `nn.Dropout`
modules: attention dropout, functional dropout, dropped layers and router noise read `self.training`, differently in
each class. Setting rates to 0 would require knowing them all. Gradients do not need train mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def train_adapter_dropout(model: torch.nn.Module) -> None:
    """Enable the dropout of LoRA adapters only: setting `lora.dropout` asks for noise in the update."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "lora_dropout":
            module.train()


@contextmanager
def without_adapter_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Disable the dropout of adapters, which would make passes differ."""
    model.eval()
    try:
        yield
    finally:
        train_adapter_dropout(model)


def checkpoint_layers(model: torch.nn.Module) -> None:
    """Recompute each layer in the backward pass. transformers' own switch works in train mode only.

    Raises ValueError when the class has no such layers.
    """
    for layer in decoder_layers(model, "gradient_checkpointing"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def decoder_layers(model: torch.nn.Module, setting: str) -> list[torch.nn.Module]:
    """Return the decoder layers for a setting that changes each. Raises ValueError when the class marks none."""
    layers: list[torch.nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{setting}: {type(model).__name__} marks no decoder layers; set it to false")
    return layers


class WideAttention(TorchFunctionMode):
    """Attention in float32 under autocast on a CPU, where the fused half-precision backward pass is slower. Measured:
    by a factor of two at 100 columns, and not at all at `COLUMNS`."""

    COLUMNS = 512

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        attention = func is torch.nn.functional.scaled_dot_product_attention and len(args) == 3
        if not attention or args[1].shape[-2] > self.COLUMNS:
            return func(*args, **kwargs)
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype != torch.bool:
            kwargs = kwargs | {"attn_mask": mask.float()}
        with torch.autocast("cpu", enabled=False):
            return func(*(x.float() for x in args), **kwargs)


@torch.no_grad()
def halve_frozen(*models: torch.nn.Module) -> None:
    """Store frozen matrices of linear layers in bfloat16 if that is lossless, e.g. if they were saved in it.

    Autocast then gives the same products without copies. Embeddings, norms and biases are unchanged: hidden states
    between products are float32.
    """
    for model in models:
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        for module in model.modules():
            if type(module) is not torch.nn.Linear or module.weight.requires_grad or module.weight is embedding:
                continue
            half = module.weight.to(torch.bfloat16)
            if torch.equal(half.to(module.weight.dtype), module.weight):
                module.weight.data = half
