"""`torch_compile`: decoder layers, the head's passes over logits and the attention of prefix trees as fused kernels.

A layer of Qwen3 starts 230 kernels in an update and 90 compiled (docs/gpu.md). Attention under a dense mask computes
all pairs of a lane, and repeats keys and values for each query head; flex attention skips blocks of tokens that do not
see each other. Lanes can then be as wide as a pass, without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..batch import PrefixTrees
from .eval_mode import decoder_layers

BACKEND = "inductor"
BLOCK = 128
"""Tokens of a block: the size that flex attention's kernels take."""
SPARSE_ON = frozenset({"cuda"})
"""Devices whose flex attention has a backward pass."""
NAME = "winnow_trees"


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for any sizes."""
    return torch.compile(function, dynamic=True, backend=BACKEND)


def compile_layers(model: torch.nn.Module) -> None:
    """Compile each decoder layer. They are one class, so that all share what is compiled for the first.

    Raises ValueError when the class has no such layers.
    """
    for layer in decoder_layers(model, "torch_compile"):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)


def attend_by_blocks(model: Any) -> bool:
    """Let the model take a `block_mask`; return whether it does. Other masks mean what they meant."""
    if model.device.type not in SPARSE_ON or model.config._attn_implementation not in ("sdpa", NAME):
        return False
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention [B, T, heads, width] as transformers' layers call it."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    shared = query.shape[1] // key.shape[1]
    if shared & (shared - 1):  # flex attention's kernel for short rows shares heads among powers of 2
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    attend: Any = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
    query, key = query.to(value.dtype), key.to(value.dtype)  # norms under autocast make them float32
    states = attend(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
    return states.transpose(1, 2).contiguous(), None


def block_mask(trees: PrefixTrees) -> BlockMask:
    """Return `trees.mask` by blocks: which are seen in part, and which as a whole."""
    stop_US = trees.stop_US
    U, S = stop_US.shape
    blocks = -(-S // BLOCK)
    first = torch.arange(0, blocks * BLOCK, BLOCK, device=stop_US.device)
    padded = torch.nn.functional.pad(stop_US, (0, blocks * BLOCK - S)).view(U, 1, blocks, BLOCK)
    earlier = first[:, None] > first
    end = (first + BLOCK).clamp(max=S)[:, None]
    # Queries of a block see a key until its stop: all of them if they end before the first stop of the keys' block.
    whole = earlier & (padded.amin(-1)[:, :, None] >= end)
    partly = (earlier & (padded.amax(-1)[:, :, None] > first[:, None]) | (first[:, None] == first)) & ~whole

    def seen(u: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < stop_US[u, key])

    def listed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of blocks of each row, and their numbers first."""
        order = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return mask.sum(-1, dtype=torch.int32), order.to(torch.int32)

    return BlockMask.from_kv_blocks(
        *listed(partly), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(S, S)
    )
