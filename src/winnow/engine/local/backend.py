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
    """float32, before temperature."""


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
        """Take over a checked state dict (see `check_state`) by copy."""
        ...


def check_state(
    state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], tied: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """`state` with tied names filled in, or ValueError naming what is missing, unknown, misshapen or not finite.

    `tied` maps a name that may be absent to the name whose tensor it shares.
    """
    full = dict(state)
    for name, source in tied.items():
        if source not in full and name in full:
            full[source] = full[name]
        if name not in full and source in full:
            full[name] = full[source]
    missing, unknown = expected.keys() - full.keys(), full.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"weights do not fit the engine's model: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]} "
            f"({len(missing)} and {len(unknown)} in all); pass the model's own state_dict() with adapters merged"
        )
    for name, tensor in full.items():
        if tensor.shape != expected[name]:
            raise ValueError(f"weight {name!r} has shape {list(tensor.shape)}, the engine needs {list(expected[name])}")
        if not _is_finite(tensor):
            raise ValueError(f"weight {name!r} is not finite; the old weights stay in use")
    for name, source in tied.items():
        if full[name] is not full[source] and not torch.equal(full[name], full[source]):
            raise ValueError(f"weights {name!r} and {source!r} differ, but the model ties them")
    return full


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(tensor.detach().aminmax())).all())
