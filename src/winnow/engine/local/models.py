"""Properties of a Hugging Face model and tokenizer that the engine needs, and the choice of a backend."""

from __future__ import annotations

from typing import Any

import torch

from .backend import Backend
from .hf import HFBackend, refuse_unsupported
from .llama import LlamaBackend, supports

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIXED_COLUMNS = 4096


def make_backend(
    model: Any, tokenizer: Any, max_length: int | None, dtype: str | None, device: torch.device | str | None
) -> Backend:
    """Copies the model's weights. Ids above the tokenizer's last are padding of the vocabulary and never sampled."""
    refuse_unsupported(model, max_length)
    weight = model.get_input_embeddings().weight
    kind = weight.dtype if dtype is None else DTYPES[dtype]
    place = weight.device if device is None else torch.device(device)
    vocab_size = min(max(tokenizer.get_vocab().values()) + 1, weight.shape[0])
    with torch.no_grad():  # not inference_mode: its tensors could not be overwritten by new weights
        if max_length is not None and supports(model):
            return LlamaBackend(model, vocab_size=vocab_size, max_length=max_length, dtype=kind, device=place)
        return HFBackend(model, vocab_size=vocab_size, dtype=kind, device=place)


def longest(model: Any, wanted: int | None) -> int | None:
    """Most tokens of a sequence: the caller's limit, else the model's; None if there is neither."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is not None and limit is not None and wanted > limit:
        raise ValueError(f"max_length {wanted} exceeds the model's {limit} positions")
    return wanted if wanted is not None else limit


def fixed_columns(max_length: int | None) -> int:
    """Columns to compute in every step, or ValueError if nobody said how many are really needed."""
    if max_length is None or max_length > FIXED_COLUMNS:
        raise ValueError(f"fixed_slots computes max_length={max_length} columns a step; set it to what you need")
    return max_length


def tied_names(model: Any) -> dict[str, str]:
    """State-dict names whose tensor the model shares with an earlier name."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return tied


def eos_ids(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """End-of-sequence ids of tokenizer, generation config and config; each may give none, one id or a list."""
    found: set[int] = set()
    for source in (tokenizer, getattr(model, "generation_config", None), model.config):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list | tuple) else {ids} if ids is not None else set()
    return frozenset(int(i) for i in found if 0 <= i < vocab_size)
