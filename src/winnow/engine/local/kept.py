"""Keys and values of sequences between two turns, in no slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Kept:
    """The beginning of a sequence that has been through the model."""

    tokens: tuple[int, ...]
    keys: list[torch.Tensor]
    """One a layer, [heads, len(tokens), D]."""
    values: list[torch.Tensor]


class KeptSequences:
    """Kept sequences, at most `capacity`; the one kept for longest makes room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, id_: Hashable, kept: Kept) -> None:
        self._kept[id_] = kept
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def take(self, id_: Hashable, prompt: tuple[int, ...]) -> Kept | None:
        """Sequence kept for `id_`, if `prompt` continues it; forgotten either way."""
        kept = self._kept.pop(id_, None)
        return kept if kept is not None and prompt[: len(kept.tokens)] == kept.tokens else None

    def forget(self, id_: Hashable) -> None:
        self._kept.pop(id_, None)

    def clear(self) -> None:
        self._kept.clear()


def stacked(past: list[list[torch.Tensor]], more: int) -> list[torch.Tensor]:
    """Stack sequences: one [B, heads, P + more, D] a layer, `past` on the left, zeros behind.

    `past[b][l]` is [heads, P_b, D]; P is the longest P_b.
    """
    width = max(layers[0].shape[1] for layers in past) + more
    result = []
    for tensors in zip(*past, strict=True):
        heads, _, size = tensors[0].shape
        buffer = tensors[0].new_zeros(len(tensors), heads, width, size)
        for row, tensor in zip(buffer, tensors, strict=True):
            row[:, : tensor.shape[1]] = tensor
        result.append(buffer)
    return result


def causal_mask(positions_BS: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, S, columns]: 0 where a query at that position may look, else -inf."""
    open_ = torch.arange(columns, device=positions_BS.device) <= positions_BS[..., None]
    mask = torch.zeros(open_.shape, dtype=dtype, device=open_.device)
    return mask.masked_fill_(~open_, -torch.inf)[:, None]
