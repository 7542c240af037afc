"""Baselines of single tokens (OTB), from the forward pass that the update makes anyway."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...methods.advantage.otb import at_tokens, energy, token_baselines, token_sums
from ...methods.loss import LossConfig
from ...methods.segments import sum_by_rollout
from ..base import Stats
from ..batch import MicroBatch, Pools
from .update_stats import Logp, correction_weights


class TokenBaselines:
    """Baselines per token. If groups span micro-batches, a forward pass over all of them comes first."""

    def __init__(self, logp: Logp) -> None:
        self.logp = logp
        self._baseline_PA = torch.zeros(0)
        self._ahead: dict[int, torch.Tensor] = {}
        """Baselines computed in advance, by the list of their micro-batches."""

    def ahead(self, batches: Sequence[MicroBatch], loss: LossConfig) -> None:
        """Compute in advance the baselines that need extra passes: one for each of `spread_over_several(batches)`."""
        first = [
            batch.pools for batch in spread_over_several(batches) if batch.pools and batch is batch.pools.pieces[0]
        ]
        self._ahead = {id(pools.pieces): token_baselines(self._over(pools, loss)) for pools in first}

    def __call__(
        self,
        batch: MicroBatch,
        loss: LossConfig,
        logp_BT: torch.Tensor,
        squares_BT: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return baselines of the action tokens, float64 [B, T-1]; `weights` are those of the loss."""
        pools = batch.pools
        assert pools is not None
        if len(pools.pieces) == 1:
            self._baseline_PA = token_baselines(_sums(batch, pools, energy(logp_BT.detach(), squares_BT, weights)))
        elif batch is pools.pieces[0]:
            ahead = self._ahead.pop(id(pools.pieces), None)
            self._baseline_PA = token_baselines(self._over(pools, loss)) if ahead is None else ahead
        return at_tokens(self._baseline_PA, pools.number_B, batch.mask_BT[:, 1:], batch.rollout_B)

    @torch.no_grad()
    def _over(self, pools: Pools, loss: LossConfig) -> torch.Tensor:
        longest = max(int(sum_by_rollout(p.mask_BT[:, 1:].sum(1), p.rollout_B).max()) for p in pools.pieces)
        total = torch.zeros(4, len(pools.mean_P), longest, dtype=torch.float64, device=pools.mean_P.device)
        for piece in pools.pieces:
            assert piece.pools is not None
            logp_BT, _, squares_BT = self.logp(piece, squares=True)
            weights, _ = correction_weights(piece, loss, logp_BT, Stats())
            sums = _sums(piece, piece.pools, energy(logp_BT, squares_BT, weights))
            total[..., : sums.shape[2]] += sums
        return total


def spread_over_several(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches with token baselines whose pools span several micro-batches."""
    return [b for b in batches if b.pools and b.pools.weighing == "energy" and len(b.pools.pieces) > 1]


def _sums(batch: MicroBatch, pools: Pools, energy_BT: torch.Tensor) -> torch.Tensor:
    numbers, groups = pools.number_B, len(pools.mean_P)
    return token_sums(batch.advantages_B, energy_BT, batch.mask_BT[:, 1:], numbers, groups, batch.rollout_B)
