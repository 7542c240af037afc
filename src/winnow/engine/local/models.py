"""The choice of a backend."""

from __future__ import annotations

from typing import Any

import torch

from ..facts import Facts
from .hf import HFBackend, refuse_unsupported
from .llama import LlamaBackend, supports

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIXED_COLUMNS = 4096


def make_backend(
    model: Any, facts: Facts, dtype: str | None, device: torch.device | str | None
) -> HFBackend | LlamaBackend:
    """Copies the model's weights."""
    refuse_unsupported(model, facts.max_length)
    weight = model.get_input_embeddings().weight
    kind = weight.dtype if dtype is None else DTYPES[dtype]
    place = weight.device if device is None else torch.device(device)
    with torch.no_grad():  # not inference_mode: its tensors could not be overwritten by new weights
        if facts.max_length is not None and supports(model):
            sizes = {"vocab_size": facts.vocab_size, "max_length": facts.max_length}
            return LlamaBackend(model, **sizes, dtype=kind, device=place)
        return HFBackend(model, vocab_size=facts.vocab_size, dtype=kind, device=place)


def fixed_columns(max_length: int | None) -> int:
    """Columns to compute in every step, or ValueError if nobody said how many are really needed."""
    if max_length is None or max_length > FIXED_COLUMNS:
        raise ValueError(f"fixed_slots computes max_length={max_length} columns a step; set it to what you need")
    return max_length
