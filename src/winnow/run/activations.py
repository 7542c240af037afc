"""What the activations of an update take, and what `auto` makes of it: the size of micro-batches, layers recomputed."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

AT_MOST = 16_384
"""Tokens of a micro-batch: more are no faster."""
AT_LEAST = 256
"""Fewer are slower: a pass over all the weights takes as long as the products with so few tokens."""
ON_CPU = 1 << 30
"""Bytes for the activations of a micro-batch; larger ones are no faster there, measured at 0.6 and 135 million
parameters (docs/benchmarks.md)."""
LONGEST = 1 / 2
"""Share of the memory that the activations of the longest row may take before layers are recomputed."""


def bytes_per_token(model: Any) -> int:
    """What a backward pass needs of one token: inputs and outputs of all matrices but those of the vocabulary.

    Weights are not looked at; they may be on the meta device. An estimate: at 135 million parameters 1.2 MB, where
    1.2 to 1.6 were measured.
    """
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    vocabulary = {id(end.weight) for end in ends if end is not None}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in vocabulary]
    return sum(4 * (p.shape[0] + p.shape[1]) for p in matrices)


def choose_tokens(model: Any) -> tuple[int, str]:
    """Tokens of a micro-batch on a CPU, and why: by the model alone, never by what is free."""
    each = max(1, bytes_per_token(model))
    tokens = max(AT_LEAST, min(AT_MOST, ON_CPU // each))
    return (
        tokens,
        f"activations of a token take about {each / 1e6:.2g} MB, those of a micro-batch {_gib(tokens * each)}",
    )


def choose_checkpointing(model: Any, device: torch.device, longest: int) -> tuple[bool, str]:
    """Whether to recompute layers, and why. `longest`: tokens of the longest row that there can be."""
    needed, there = longest * bytes_per_token(model), memory_of(device)
    says = f"{longest:,} tokens need about {_gib(needed)} of {_gib(there)} without it"
    layers = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers and needed > LONGEST * there, says


def memory_of(device: torch.device) -> int:
    """Bytes that the device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(bytes_: float) -> str:
    return f"{bytes_ / 2**30:.2g} GiB"
