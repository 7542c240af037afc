"""Memory of an update's activations, and what `auto` derives from it: micro-batch size, recomputed layers."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

AT_MOST = 16_384
"""Most tokens of a micro-batch: more are no faster."""
AT_LEAST = 256
"""Fewest tokens: with fewer, a pass over the weights takes as long as the products."""
ON_CPU = 1 << 30
"""Bytes for the activations of a micro-batch on a CPU; more are no faster, measured at 0.6 and 135 million parameters
(docs/benchmarks.md)."""
LONGEST = 1 / 2
"""Share of memory the activations of the longest row may take before layers are recomputed."""


def bytes_per_token(model: Any) -> int:
    """Estimate what a backward pass needs per token: inputs and outputs of all matrices except the vocabulary's.

    Weights may be on the meta device. At 135 million parameters it gives 1.2 MB; 1.2 to 1.6 were measured.
    """
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    vocabulary = {id(end.weight) for end in ends if end is not None}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in vocabulary]
    return sum(4 * (p.shape[0] + p.shape[1]) for p in matrices)


def choose_tokens(model: Any) -> tuple[int, str]:
    """Return the tokens of a micro-batch on a CPU, and why. Depends on the model only, not on free memory."""
    each = max(1, bytes_per_token(model))
    tokens = max(AT_LEAST, min(AT_MOST, ON_CPU // each))
    why = f"activations of a token take about {each / 1e6:.2g} MB, those of a micro-batch {_gib(tokens * each)}"
    return tokens, why


def choose_checkpointing(model: Any, device: torch.device, longest: int) -> tuple[bool, str]:
    """Return whether to recompute layers, and why. `longest`: tokens of the longest possible row."""
    needed, memory = longest * bytes_per_token(model), memory_of(device)
    why = f"{longest:,} tokens need about {_gib(needed)} of {_gib(memory)} without it"
    layers = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers and needed > LONGEST * memory, why


def memory_of(device: torch.device) -> int:
    """Return the device's total memory in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(bytes_: float) -> str:
    return f"{bytes_ / 2**30:.2g} GiB"
