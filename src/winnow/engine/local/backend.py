"""The backend of an engine: two forward passes and a way to swap weights.

Shapes: N rows of a decode step, B prompts of a prefill, P the longest prompt of a batch, H hidden size, V sampled
vocabulary, D size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .cache import Chunk, KVCache
from .kept import Kept


@dataclass(frozen=True, slots=True)
class Output:
    """Results at the last position of each row."""

    hidden_NH: torch.Tensor
    """Input of the lm_head."""
    logits_NV: torch.Tensor
    """Before temperature, in the type of the weights or float32."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts that went through the model together. Columns past a prompt's length hold finite garbage."""

    keys: list[torch.Tensor]
    """One a layer, [B, heads, P, D]."""
    values: list[torch.Tensor]
    lengths: list[int]
    last: Output


class Backend(Protocol):
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    kv_shapes: list[tuple[tuple[int, int], tuple[int, int]]]
    """Shapes per layer: (heads, head size) of the keys and of the values."""
    mixed_lengths: bool
    """Whether one prefill takes prompts of different lengths."""

    def prefill(self, prompts: list[tuple[int, ...]]) -> Prefilled: ...

    def extend(self, tails: list[tuple[int, ...]], past: list[Kept]) -> Prefilled:
        """Go on with sequences whose beginnings are kept; `tails` holds what is new of each, at least one token.

        The tails have equal lengths unless `mixed_lengths`.
        """
        ...

    def decode(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, cache: KVCache, chunks: list[Chunk]) -> Output:
        """Run one token of rows 0..N-1, write its keys and values to column `positions_N`, attend up to there."""
        ...

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a checked state dict (see `Facts.check_state`) by copy."""
        ...

    def release(self) -> None:
        """Give up the memory of the weights until the next `load`."""
        ...
