"""Draw one token per row by inverse CDF from given uniform numbers, with its log-probability.

Tokens partition the unit interval in the order of their ids. Sums that decide a token are float64, so that a vocabulary
of 150,000 keeps the weights of its rare tokens.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ..base.token_filters import lowest_kept, relative_weights, running_sum

BLOCK, PIECE = 1024, 64
"""Vocabularies longer than a block are searched in two levels. A block's sum is the float64 sum of float32 sums of
pieces, which are too short for a rare token to be rounded away."""
CACHED = 1 << 19
"""Logits sampled at a time: several passes over them should hit the processor's cache."""


class Transform(NamedTuple):
    """Sampling parameters of N rows."""

    inverse_temperature_N: torch.Tensor
    """float32; 1 for greedy rows, which have no filter."""
    greedy_N: torch.Tensor | None
    """bool; None when no row is greedy."""
    top_k_N: torch.Tensor | None
    """int64, 0 off; None (with the others) when no row filters."""
    top_p_N: torch.Tensor | None
    """float32, 1 off."""
    min_p_N: torch.Tensor | None
    """float32, 0 off."""


def sample(logits_NV: torch.Tensor, uniform_N: torch.Tensor, transform: Transform) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (int64 [N]) and log-probabilities (float32 [N], nats) under the distribution actually drawn from.

    `uniform_N` in [0, 1). A greedy row takes the first of the most likely tokens. Non-finite logits give a non-finite
    log-probability.
    """
    rows = max(1, CACHED // logits_NV.shape[1])
    if len(logits_NV) > rows and logits_NV.device.type == "cpu":
        given = [logits_NV, uniform_N, *transform]
        parts = zip(*(itertools.repeat(None) if x is None else x.split(rows) for x in given), strict=False)
        sampled = [_sample(logits, uniform, Transform(*rest)) for logits, uniform, *rest in parts]
        tokens, logp = zip(*sampled, strict=True)
        return torch.cat(tokens), torch.cat(logp)
    return _sample(logits_NV, uniform_N, transform)


def _sample(
    logits_NV: torch.Tensor, uniform_N: torch.Tensor, transform: Transform
) -> tuple[torch.Tensor, torch.Tensor]:
    weights_NV = relative_weights(logits_NV, transform.inverse_temperature_N)
    _, _, *filters = transform
    if all(of_row is not None for of_row in filters):
        floor_N1 = lowest_kept(weights_NV, *filters)  # type: ignore[arg-type]
        weights_NV = weights_NV.masked_fill(weights_NV < floor_N1, 0)
    tokens_N, total_N = draw(weights_NV, uniform_N)
    if transform.greedy_N is not None:
        tokens_N = torch.where(transform.greedy_N, logits_NV.argmax(-1), tokens_N)
    weight_N = weights_NV.gather(1, tokens_N[:, None])[:, 0]
    return tokens_N, (weight_N / total_N).log_().float()


def raw_logp(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of tokens before temperature and filters, float32 [N]."""
    logits_NV = logits_NV.float()
    return logits_NV.gather(1, tokens_N[:, None])[:, 0] - logits_NV.logsumexp(-1)


def draw(weights_NV: torch.Tensor, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens where the running sum of `weights_NV` (>= 0) passes `uniform_N` of the total; the float64 total."""
    if weights_NV.shape[1] <= BLOCK:
        cdf_NV = running_sum(weights_NV, torch.float64)
        total_N = cdf_NV[:, -1]
        return _passing(cdf_NV, total_N * uniform_N), total_N
    V = weights_NV.shape[1]
    whole = V // BLOCK * BLOCK
    pieces_NBP = weights_NV[:, :whole].unflatten(1, (-1, BLOCK // PIECE, PIECE)).sum(-1)
    rest_N1 = weights_NV[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
    sums_NB = torch.cat([pieces_NBP.sum(-1, dtype=torch.float64), rest_N1], 1)
    cdf_NB = running_sum(sums_NB)
    total_N = cdf_NB[:, -1].contiguous()
    target_N = total_N * uniform_N
    block_N1 = _passing(cdf_NB, target_N)[:, None]
    before_N = (cdf_NB.gather(1, block_N1) - sums_NB.gather(1, block_N1))[:, 0]
    first_N = block_N1[:, 0] * BLOCK
    start_N = first_N.clamp(max=V - BLOCK)  # the last block is shorter: read it with the previous block's end
    inside_NC = weights_NV.unfold(1, BLOCK, 1)[torch.arange(len(start_N), device=start_N.device), start_N]
    if whole < V:
        columns_C = torch.arange(BLOCK, device=weights_NV.device)
        inside_NC = inside_NC.masked_fill(columns_C < (first_N - start_N)[:, None], 0)
    inner_N = _passing(running_sum(inside_NC, torch.float64), target_N - before_N)
    return start_N + inner_N, total_N


def _passing(cdf_NV: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum is above the target, never an index of weight 0."""
    last_N = cdf_NV[:, -1]
    below_N = last_N.nextafter(last_N.new_zeros(()))
    target_N = torch.minimum(target_N.clamp_(min=0), below_N)
    index_N = torch.searchsorted(cdf_NV, target_N[:, None], right=True)[:, 0]
    # Only NaN sums run past the end; their log-probability is then not finite.
    return index_N.clamp_(max=cdf_NV.shape[1] - 1)
