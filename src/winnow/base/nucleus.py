"""Which tokens top-k, top-p and min-p keep: one rule for who samples and who trains.

Rounded logits (bfloat16) often tie, and two rules for ties are two distributions.
"""

from __future__ import annotations

import torch


def relative_weights(logits_NV: torch.Tensor, inverse_temperature_N: torch.Tensor) -> torch.Tensor:
    """float32 [N, V]: probabilities up to a factor, the likeliest token of each row at 1."""
    scaled_NV = logits_NV.float() * inverse_temperature_N[:, None]
    return scaled_NV.sub_(scaled_NV.amax(-1, keepdim=True)).exp_()


def lowest_kept(
    weights_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor, min_p_N: torch.Tensor
) -> torch.Tensor:
    """[N, 1]: tokens of a smaller weight are dropped.

    `weights_NV`: the heaviest of each row at 1. Kept are each row's `top_k` heaviest tokens (0: all), of them the
    fewest that hold `top_p` of their sum, and all that weigh as much as the lightest of those: ties stay. Of all these,
    those that weigh at least `min_p`. Sums are float64.
    """
    V = weights_NV.shape[1]
    k_N = torch.where(top_k_N > 0, top_k_N, V).clamp(max=V)
    top_NK = weights_NV.topk(int(k_N.max()), dim=-1).values
    rank_K = torch.arange(top_NK.shape[1], device=top_NK.device)
    top_NK = top_NK.masked_fill(rank_K >= k_N[:, None], 0)
    cdf_NK = running_sum(top_NK, torch.float64)
    before_NK = cdf_NK - top_NK
    kept_N = (before_NK < top_p_N[:, None].double() * cdf_NK[:, -1:]).sum(-1)
    last_N = torch.where(top_p_N < 1, kept_N, k_N).clamp(min=1) - 1
    return torch.maximum(top_NK.gather(1, torch.minimum(last_N, k_N - 1)[:, None]), min_p_N[:, None])


def running_sum(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`cumsum` over the last dimension of [K] or [N, K], also where PyTorch is set to deterministic algorithms.

    On a GPU it then refuses all of `cumsum`, of which the kernel for a single row alone adds in any order.
    """
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(-1, dtype=dtype)
    rows = torch.atleast_2d(values)
    torch.use_deterministic_algorithms(False)
    try:
        sums = (rows.expand(2, -1) if len(rows) == 1 else rows).cumsum(-1, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(True)
    return sums[: len(rows)].view(values.shape)
