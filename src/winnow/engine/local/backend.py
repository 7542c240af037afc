"""What passes between the engine and its two backends, which have the same methods (see `llama`).

Shapes: N rows of a decode step, B prompts of a prefill, P the longest prompt of a batch, H hidden size, V sampled
vocabulary, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")
Tokens = tuple[int, ...]

PREFILL_TOKENS = 16_384
"""New tokens of one pass over prompts, padding included."""
MASK_ELEMENTS = 1 << 24
"""Pairs of a new token and a column of one pass behind kept beginnings, whose mask has an element for each."""


@dataclass(frozen=True, slots=True)
class Output:
    """Results at the last position of each row."""

    hidden_NH: torch.Tensor
    """Input of the lm_head."""
    logits_NV: torch.Tensor
    """Before temperature, in the type of the weights or float32."""

    @classmethod
    def joined(cls, outputs: list[Output]) -> Output:
        """Return the rows of all."""
        if len(outputs) == 1:
            return outputs[0]
        return cls(torch.cat([o.hidden_NH for o in outputs]), torch.cat([o.logits_NV for o in outputs]))


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts that went through the model together. Columns past a prompt's length hold finite garbage."""

    keys: list[torch.Tensor]
    """One a layer, [B, heads, P, D]."""
    values: list[torch.Tensor]
    lengths: list[int]
    last: Output
    drafted: Drafted | None = None
    """Of prompts with drafts behind them, whose keys and values follow the prompts'."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the first tokens behind prompts are drawn from, while they are those of the prompts' drafts."""

    hidden_NH: torch.Tensor
    """Inputs of the lm_head at the last token of each prompt and all tokens of its draft, prompt by prompt."""
    starts_B: np.ndarray
    """Where each prompt's begin."""
    lengths_B: np.ndarray
    """Tokens of each draft."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The beginning of a sequence that has been through the model."""

    tokens: tuple[int, ...]
    keys: list[torch.Tensor]
    """One a layer, [heads, len(tokens), D]."""
    values: list[torch.Tensor]

    def up_to(self, n: int) -> Kept:
        """Return the first `n` tokens of it."""
        return Kept(self.tokens[:n], [k[:, :n] for k in self.keys], [v[:, :n] for v in self.values])


class KeptSequences:
    """Sequences between two turns, in no slot: at most `capacity`; the oldest id makes room. An id may have several."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[Hashable, list[Kept]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def __contains__(self, id_: Hashable) -> bool:
        return id_ in self._kept

    def put(self, id_: Hashable, kept: Kept) -> None:
        self._kept.setdefault(id_, []).append(kept)
        if len(self) > self._capacity:
            oldest = next(iter(self._kept))
            del self._kept[oldest][0]
            if not self._kept[oldest]:
                del self._kept[oldest]

    def take(self, id_: Hashable, prompt: tuple[int, ...]) -> Kept | None:
        """Return the longest beginning of `prompt` kept for `id_`, unless siblings' shared prefill would save more.

        It is forgotten if `prompt` continues all of it.
        """
        own = self._kept.get(id_, [])
        shared = [common(kept.tokens, prompt[:-1]) for kept in own]  # the last token has to be computed
        longest = max(shared, default=0)
        if not longest:
            return None
        number = shared.index(longest)
        kept = own[number]
        if longest < len(kept.tokens):
            return kept.up_to(longest) if 2 * longest >= len(prompt) else None
        del own[number]
        if not own:
            del self._kept[id_]
        return kept

    def forget(self, id_: Hashable) -> None:
        self._kept.pop(id_, None)

    def clear(self) -> None:
        self._kept.clear()


def common(a: Tokens, b: Tokens) -> int:
    """Return the length of what both begin with."""
    most = min(len(a), len(b))
    return most if a[:most] == b[:most] else next(i for i in range(most) if a[i] != b[i])


def passes(items: Sequence[T], lengths: Callable[[T], tuple[int, int]], mixed_lengths: bool) -> list[list[T]]:
    """Return groups of what goes through the model in one pass.

    `lengths`: the new tokens of each, and those kept before them. Neither differs much within a group.
    """
    groups: list[list[T]] = []
    shortest = least = most = 0  # new tokens of the last group, and those before them
    for item in sorted(items, key=lengths):
        new, before = lengths(item)
        low, high = min(least, before), max(most, before)
        alike = (new == shortest or (mixed_lengths and new <= 2 * shortest + 16)) and high <= 2 * low + 16
        computed = new * (len(groups[-1]) + 1) if groups else 0
        fits = computed <= PREFILL_TOKENS and (not high or computed * (high + new) <= MASK_ELEMENTS)
        if groups and alike and fits:
            groups[-1].append(item)
            least, most = low, high
        else:
            groups.append([item])
            shortest, least, most = new, before, before
    return groups


def continued(
    past: list[Kept], more: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return what a pass over `more` new tokens behind each of B kept beginnings needs.

    Their positions [B, more]; keys and values with room for them, one [B, heads, columns, D] a layer; the mask.
    """
    starts = torch.tensor([len(kept.tokens) for kept in past], device=device)
    positions_BS = starts[:, None] + torch.arange(more, device=device)
    keys, values = _stacked([kept.keys for kept in past], more), _stacked([kept.values for kept in past], more)
    return positions_BS, keys, values, _causal_mask(positions_BS, keys[0].shape[2], dtype)


def _stacked(past: list[list[torch.Tensor]], more: int) -> list[torch.Tensor]:
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


def _causal_mask(positions_BS: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, S, columns]: 0 where a query at that position may look, else -inf."""
    open_ = torch.arange(columns, device=positions_BS.device) <= positions_BS[..., None]
    mask = torch.zeros(open_.shape, dtype=dtype, device=open_.device)
    return mask.masked_fill_(~open_, -torch.inf)[:, None]


@dataclass(slots=True)
class WaitingPrompt:
    """A prompt and a draft, kept until the last request for both has started."""

    waiting: int = 0
    prefilled: Prefilled | None = None
    index: int = 0
    computed: int = 0
    """Tokens of its prefill, until a sequence has started from it."""
