"""Forward passes from a micro-batch to the hidden states or logits that predict its sampled tokens.

Siblings of a group share a prompt, and often more. Where it saves something, what rows share runs through the model
once (`PrefixTrees`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...engine.facts import WINDOWS, has_local_layers
from ...types import Rollout
from ..batch import MicroBatch, PassLimits, collate
from ..rows import Row
from .compiled import block_mask

Body = Callable[..., torch.Tensor]
"""A model's forward as a function to [B, T, H] hidden states or [B, T, V] logits."""


def predictions(
    body: Body, batch: MicroBatch, dtype: torch.dtype, *, by_blocks: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the P distinct states [P, H] or [P, V] that predict tokens, and which of them predicts each of the N True
    entries of `mask_BT`, in row-major order; None: each has its own. `dtype`: of products. `by_blocks`: the model
    takes a block mask of prefix trees."""
    trees = batch.trees
    if trees is None:
        return batch.sampled(body(input_ids=batch.input_ids_BT[:, :-1], use_cache=False)), None
    states = body(
        input_ids=trees.input_ids_US,
        position_ids=trees.position_ids_US,
        attention_mask=block_mask(trees) if by_blocks else trees.mask(dtype),
        use_cache=False,
    )
    return states.flatten(0, 1)[trees.predicting_P], trees.predicting_N


@torch.no_grad()
def can_share(model: Any, body: Body, n_tokens: int) -> bool:
    """Return whether the model uses full attention under any mask, and a trial gives the same numbers."""
    config, parameters = model.config.get_text_config(), inspect.signature(model.forward).parameters
    windowed = any(getattr(config, name, None) for name in WINDOWS)
    if has_local_layers(config):  # its mask depends on columns, and the trial is narrower than its window
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not {"position_ids", "attention_mask"} <= parameters.keys() or getattr(model, "_is_stateful", False):
        return False
    if kinds != {"full_attention"} or (windowed and not getattr(config, "layer_types", None)):
        return False
    ids_BT = np.random.default_rng(0).integers(0, n_tokens, (5, 8))
    ids_BT[1, :2], ids_BT[3, :6], ids_BT[4, :5] = ids_BT[0, :2], ids_BT[2, :6], ids_BT[2, :5]
    rows = [_row(ids_T, prompt) for ids_T, prompt in zip(ids_BT, (2, 2, 4, 4, 4), strict=True)]
    batch = collate(rows, 0, model.get_input_embeddings().weight.device, PassLimits(pairs=math.inf))
    try:
        apart, _ = predictions(body, replace(batch, trees=None), model.dtype)
        states_PH, of_N = predictions(body, batch, model.dtype)
    except (TypeError, ValueError, RuntimeError, IndexError):  # a class that takes no such mask, each in its own way
        return False
    return torch.allclose(states_PH[of_N], apart, rtol=1e-3, atol=1e-3 * float(apart.abs().max()))


def _row(ids_T: np.ndarray, prompt: int) -> Row:
    none = np.zeros(len(ids_T) - prompt)
    return Row(Rollout(0, tuple(ids_T[:prompt].tolist()), ids_T[prompt:], none == 0, none, none), 0.0, 1.0)


@torch.no_grad()
def head_is_linear(model: Any, n_tokens: int) -> bool:
    """Return whether logits are just head(hidden); classes that scale or cap them need the whole model.

    The head's output is replaced by large numbers: near 0, where an untrained model's logits are, a cap is linear.
    """
    head = model.get_output_embeddings()
    if head is None:
        return False
    inputs, outputs = [], []

    def enlarge(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        inputs.append(args[0])
        outputs.append(torch.linspace(-100, 100, output.numel(), device=output.device).to(output).view_as(output))
        return outputs[0]

    ids = torch.arange(4, device=head.weight.device)[None] % n_tokens
    handle = head.register_forward_hook(enlarge)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    if len(outputs) != 1 or logits.shape != outputs[0].shape or hidden.shape != inputs[0].shape:
        return False
    return torch.allclose(logits.to(outputs[0]), outputs[0]) and torch.allclose(hidden, inputs[0], rtol=1e-4)
