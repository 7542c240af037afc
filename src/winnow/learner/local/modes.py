"""The mode of a model in the learner: eval, with gradients.

The engine samples in eval mode, and the update must be of that policy. Train mode turns on more than `nn.Dropout`
modules: attention dropout, functional dropout, dropped layers and router noise read `self.training`, each class in its
own way. Setting rates to 0 would have to know them all. Gradients do not need train mode.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def train_adapter_dropout(model: torch.nn.Module) -> None:
    """Turn on the dropout of LoRA adapters alone; who sets `lora.dropout` wants noise in the update."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "lora_dropout":
            module.train()


def checkpoint_layers(model: torch.nn.Module) -> None:
    """Recompute each layer in the backward pass. transformers does so in train mode only, hence not by its own switch.

    Raises ValueError when the class has no such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that can be recomputed; set it to false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
