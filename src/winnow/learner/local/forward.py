"""Forward passes from a micro-batch to the hidden states or logits that predict its sampled tokens.

Siblings of a group share a prompt. Where it saves enough, prompts run through the model once and completions attend to
their keys and values. The gradient flows back through the cache, so nothing is approximated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..batch import MicroBatch, SharedPrompts

Body = Callable[..., torch.Tensor]
"""A model's forward as a function to [B, T, H] hidden states or [B, T, V] logits."""
WINDOWS = ("sliding_window", "attention_chunk_size")


def predictions(body: Body, batch: MicroBatch, *, share: bool) -> torch.Tensor:
    """Return [N, H] or [N, V] for the N True entries of `mask_BT`, in row-major order."""
    if share and batch.shared is not None:
        return _with_shared_prompts(body, batch, batch.shared)
    return body(input_ids=batch.input_ids_BT[:, :-1], use_cache=False)[batch.mask_BT[:, 1:]]


def _with_shared_prompts(body: Body, batch: MicroBatch, shared: SharedPrompts) -> torch.Tensor:
    """Compute each prompt once. Right padding is hidden from prompts by causality, from completions by a mask."""
    cache = DynamicCache()
    prompt_ids_UP = batch.input_ids_BT[shared.first_U, : shared.longest_prompt]
    prompt_states = body(input_ids=prompt_ids_UP, past_key_values=cache, use_cache=True)
    states = prompt_states[shared.prompt_B, shared.length_B - 1][:, None]
    inputs = shared.longest_completion - 1  # the last token of a completion predicts nothing
    if inputs:
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys = layer.keys.index_select(0, shared.prompt_B)
            layer.values = layer.values.index_select(0, shared.prompt_B)
        steps = torch.arange(inputs, device=states.device)
        positions_BC = (shared.length_B[:, None] + steps).clamp(max=batch.input_ids_BT.shape[1] - 1)
        columns = torch.arange(shared.longest_prompt, device=states.device)
        seen_BP = columns < shared.length_B[:, None]
        completion_states = body(
            input_ids=batch.input_ids_BT.gather(1, positions_BC),
            position_ids=positions_BC,
            attention_mask=torch.cat([seen_BP, torch.ones_like(positions_BC, dtype=torch.bool)], dim=1).long(),
            past_key_values=cache,
            use_cache=True,
        )
        states = torch.cat([states, completion_states], dim=1)
    rows_N, columns_N = batch.mask_BT[:, 1:].nonzero(as_tuple=True)
    return states[rows_N, columns_N - shared.length_B[rows_N] + 1]


@torch.no_grad()
def can_share_prompts(model: Any, body: Body, n_tokens: int) -> bool:
    """Return whether the model uses full attention and an ordinary cache, and a trial gives the same numbers."""
    config, parameters = model.config.get_text_config(), inspect.signature(model.forward).parameters
    windowed = any(getattr(config, name, None) for name in WINDOWS)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not {"position_ids", "past_key_values"} <= parameters.keys() or getattr(model, "_is_stateful", False):
        return False
    if kinds != {"full_attention"} or (windowed and not getattr(config, "layer_types", None)):
        return False
    device = model.get_input_embeddings().weight.device
    ids_BT = (torch.arange(4 * 8, device=device).view(4, 8) * 7 + 1) % n_tokens
    ids_BT[1, :2], ids_BT[3, :4] = ids_BT[0, :2], ids_BT[2, :4]
    length_B = torch.tensor([2, 2, 4, 4], device=device)
    mask_BT = torch.arange(8, device=device) >= length_B[:, None]
    zeros = torch.zeros(4, device=device)
    first_U, prompt_B = torch.tensor([0, 2], device=device), torch.tensor([0, 0, 1, 1], device=device)
    batch = MicroBatch(ids_BT, mask_BT, zeros, zeros, zeros, shared=SharedPrompts(first_U, prompt_B, length_B, 4, 6))
    apart, together = (predictions(body, batch, share=share).float() for share in (False, True))
    return torch.allclose(together, apart, rtol=1e-3, atol=1e-3 * float(apart.abs().max()))


@torch.no_grad()
def head_is_linear(model: Any, n_tokens: int) -> bool:
    """Return whether logits are just head(hidden); classes that scale or cap them need the whole model.

    The head's output is replaced by large numbers: near 0, where an untrained model's logits are, a cap is linear.
    """
    head = model.get_output_embeddings()
    if head is None:
        return False
    inputs, outputs = [], []

    def replace(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        inputs.append(args[0])
        outputs.append(torch.linspace(-100, 100, output.numel(), device=output.device).to(output).view_as(output))
        return outputs[0]

    ids = torch.arange(4, device=head.weight.device)[None] % n_tokens
    handle = head.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    if len(outputs) != 1 or logits.shape != outputs[0].shape or hidden.shape != inputs[0].shape:
        return False
    return torch.allclose(logits.to(outputs[0]), outputs[0]) and torch.allclose(hidden, inputs[0], rtol=1e-4)
