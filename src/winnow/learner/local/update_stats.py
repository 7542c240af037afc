"""Correction weights and statistics, shared by all kinds of update."""

from __future__ import annotations

from typing import Protocol

import torch

from ...methods.correct import Evidence
from ...methods.loss import LossConfig
from ...methods.segments import sum_by_rollout
from ..base import Stats
from ..batch import MicroBatch


class Logp(Protocol):
    def __call__(self, batch: MicroBatch, *, squares: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `of_tokens` as [B, T-1], 0 outside the mask, with its graph."""
        ...


def evidence(batch: MicroBatch, logp_BT: torch.Tensor) -> Evidence:
    """Return a correction's input; `logp_BT`: the learner's, columns shifted by one."""
    return Evidence(logp_BT, batch.sampler_logp_BT[:, 1:], batch.mask_BT[:, 1:], batch.advantages_B, batch.rollout_B)


def correction_weights(
    batch: MicroBatch, loss: LossConfig, logp_BT: torch.Tensor, stats: Stats
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token weights and the log-probabilities that a clipped ratio refers to; columns shifted by one."""
    sampler_logp = batch.sampler_logp_BT[:, 1:]
    old_logp = sampler_logp
    if loss.ratio_to_learner:
        if batch.old_logp_BT is None:
            batch.old_logp_BT = logp_BT.detach()
        old_logp = batch.old_logp_BT
    # With clipping, the ratio to `old_logp` covers later changes; the weight covers only the earlier mismatch.
    corrected = old_logp if loss.ratio_to_learner else logp_BT.detach()
    weights, metrics = loss.correction(evidence(batch, corrected))
    for name, number in metrics.items():
        stats.add(f"correction/{name}", number)
    if loss.correction.active:
        mask_BT = batch.mask_BT[:, 1:]
        stats.add("correction/masked", ((weights == 0) & mask_BT).sum())
        stats.add("correction/masked_of", float(len(batch.sampled_N)))
    return weights, old_logp


def book(
    stats: Stats, batch: MicroBatch, logp_BT: torch.Tensor, entropy_BT: torch.Tensor, **sums: torch.Tensor
) -> None:
    """Add a micro-batch's statistics, and `sums`."""
    mask = batch.mask_BT[:, 1:]
    log_ratio = (logp_BT.detach() - batch.sampler_logp_BT[:, 1:]) * mask
    stats.log_w_B.append(sum_by_rollout(log_ratio.sum(1), batch.rollout_B))
    stats.log_ratio_N.append(batch.sampled(log_ratio))
    stats.add("tokens", float(len(batch.sampled_N)))
    for name, value in (sums | {"entropy": (entropy_BT.detach() * mask).sum()}).items():
        stats.add(name, value)
