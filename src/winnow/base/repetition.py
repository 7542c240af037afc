"""Repetition penalty, shared by engines and learners: tokens already in a sequence become less likely."""

from __future__ import annotations

import torch


def seen(ids_NL: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Return bool [N, n_tokens]: which ids occur in each row of `ids_NL`."""
    return torch.zeros(len(ids_NL), n_tokens, dtype=torch.bool, device=ids_NL.device).scatter_(1, ids_NL, True)


def penalized(logits_NV: torch.Tensor, seen_NV: torch.Tensor, penalty: float | torch.Tensor) -> torch.Tensor:
    """Divide positive logits of seen tokens by the penalty and multiply the others by it (Keskar et al. 2019, as in
    transformers and vLLM). `penalty`: a number, or [N, 1]; 1 changes nothing."""
    lowered_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(seen_NV, lowered_NV, logits_NV)
