"""Token filters top-k, top-p and min-p, and the repetition penalty, shared by engines and learner.

Rounded logits (bfloat16) often tie, and two rules for ties would be two distributions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def relative_weights(logits_NV: torch.Tensor, inverse_temperature_N: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, V]: probabilities scaled so that each row's likeliest token is at 1."""
    scaled_NV = logits_NV * inverse_temperature_N[:, None]  # in float32: a GPU converts as it reads
    return scaled_NV.sub_(scaled_NV.amax(-1, keepdim=True)).exp_()


def lowest_kept(
    weights_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor, min_p_N: torch.Tensor
) -> torch.Tensor:
    """Return the smallest weight kept in each row, [N, 1].

    `weights_NV`: each row's heaviest is 1. Keeps the `top_k` heaviest tokens (0: all); of these the fewest that hold
    `top_p` of their sum, plus all ties with the lightest; then only weights of at least `min_p`. Sums are float64.
    """
    import torch

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
    """Return `cumsum` over the last dimension of [K] or [N, K], also under deterministic algorithms.

    PyTorch then refuses every `cumsum` on a GPU, although only its single-row kernel adds in any order.
    """
    import torch

    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(-1, dtype=dtype)
    rows = torch.atleast_2d(values)
    torch.use_deterministic_algorithms(False)
    try:
        sums = (rows.expand(2, -1) if len(rows) == 1 else rows).cumsum(-1, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(True)
    return sums[: len(rows)].view(values.shape)


def seen(ids_NL: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Return bool [N, n_tokens]: which ids occur in each row of `ids_NL`."""
    import torch

    return torch.zeros(len(ids_NL), n_tokens, dtype=torch.bool, device=ids_NL.device).scatter_(1, ids_NL, True)


def penalized(logits_NV: torch.Tensor, seen_NV: torch.Tensor, penalty: float | torch.Tensor) -> torch.Tensor:
    """Divide positive logits of seen tokens by the penalty and multiply the others by it (Keskar et al. 2019, as in
    transformers and vLLM). `penalty`: a number, or [N, 1]; 1 changes nothing."""
    import torch

    lowered_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(seen_NV, lowered_NV, logits_NV)
