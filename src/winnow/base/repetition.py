"""The repetition penalty: tokens that a sequence already has become less likely; the same for engines and learners."""

from __future__ import annotations

import torch


def seen(ids_NL: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """bool [N, n_tokens]: which ids stand in each row of `ids_NL`."""
    return torch.zeros(len(ids_NL), n_tokens, dtype=torch.bool, device=ids_NL.device).scatter_(1, ids_NL, True)


def penalized(logits_NV: torch.Tensor, seen_NV: torch.Tensor, penalty: float | torch.Tensor) -> torch.Tensor:
    """Logits of seen tokens divided by the penalty where they are positive and multiplied by it where they are not
    (Keskar et al. 2019, as in transformers and vLLM). `penalty`: a number, or [N, 1]; 1 changes nothing."""
    lowered_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(seen_NV, lowered_NV, logits_NV)
