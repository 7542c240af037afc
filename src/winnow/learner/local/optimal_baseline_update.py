"""Updates whose baselines depend on the rollouts' own gradients (OPOB; VCPO, sections 3.3 and 3.4).

Two strategies give the same gradients. `RowByRow`, the authors': one backward pass per rollout, for models whose
gradients cannot be separated by rows, for long rows on a CPU, and for rollouts of several segments. `Batched`: one
backward pass for all rollouts of a micro-batch (`grad_norms`), otherwise; below `ALONE_TOKENS` it is 1.5 to 4.5 times
as fast (docs/baselines.md). Both keep two sums of gradients, with and without reward weights, and subtract the baseline
at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ...methods.advantage import optimal_baseline
from ...methods.loss import LossConfig
from ...methods.policy_loss import Plain
from ...methods.segments import first_rows, sum_by_rollout
from ..base import Stats
from ..batch import MicroBatch, Pools
from .forward import predictions
from .grad_norms import RowHooks, Term, UnsupportedModelError, add_times
from .logprob import TokenDistribution
from .row_head import HeadPass, RowHead, Tokens
from .update_stats import Logp, book, correction_weights

ALONE_TOKENS = 200
"""Mean padded row length from which a CPU computes rows one by one. `Batched` is 1.5 times as fast at 128 tokens, at
most 1.2 times at 256, and takes more memory. A GPU would be mostly idle with one row."""

Give = Callable[[nn.Parameter, torch.Tensor], None]
"""Receives a part of a parameter's gradient."""


def add_to_grad(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(gradient)


class RolloutResults(NamedTuple):
    """Rewards of some rollouts of a block, and the results of their passes."""

    rewards_B: torch.Tensor
    number_B: torch.Tensor
    """Pool of each rollout."""
    norm_sq_B: torch.Tensor
    loss_B: torch.Tensor
    """Loss of each rollout at an advantage of 1."""


def basis_of(rewards_B: torch.Tensor, number_B: torch.Tensor, mean_P: torch.Tensor) -> torch.Tensor:
    """Return [P + 1, B]: each pool's rows, and all rows weighted with reward less mean reward.

    From gradient sums with these coefficients, any baselines can be subtracted afterwards.
    """
    same_PB = torch.arange(len(mean_P), device=number_B.device)[:, None] == number_B
    return torch.cat([same_PB.to(rewards_B.dtype), (rewards_B - mean_P[number_B])[None]])


def baseline_factors(parts: Sequence[RolloutResults], mean_P: torch.Tensor, stats: Stats) -> torch.Tensor:
    """Compute the baselines of all rollouts of a block; return the factors [P + 1] of its sums, `basis_of`."""
    rewards_B, number_B, norm_sq_B, loss_B = (torch.cat(column) for column in zip(*parts, strict=True))
    if not (torch.isfinite(norm_sq_B).all() and torch.isfinite(loss_B).all()):
        worst = float(norm_sq_B.max()) ** 0.5
        raise FloatingPointError(
            f"gradient norms up to {worst}, losses up to {float(loss_B.max())} of rollouts; no update was made"
        )
    rewards, norms, numbers = (x.cpu().numpy() for x in (rewards_B, norm_sq_B, number_B))
    baseline_B = torch.from_numpy(optimal_baseline(rewards, norms, numbers)).to(rewards_B)
    baseline_P = torch.zeros_like(mean_P).index_copy_(0, number_B, baseline_B)
    stats.add("loss", float(((rewards_B - baseline_B) * loss_B).sum()))
    stats.baselines.append(baseline_P)
    stats.row_norm_B.append(norm_sq_B.sqrt())
    return torch.cat([mean_P - baseline_P, mean_P.new_ones(1)])


class RowByRow:
    """One backward pass per rollout, pool by pool; works for any model and any parameters."""

    def __init__(self, params: list[nn.Parameter], logp: Logp) -> None:
        self.params = params
        self.logp = logp

    def add(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        """Add a block's gradients to `.grad` with its last micro-batch.

        Raises FloatingPointError when a norm or a loss is not finite.
        """
        pools = _pools(batch)
        if batch is not pools.pieces[-1]:
            return
        for number, mean in enumerate(pools.mean_P):
            sums: dict[nn.Parameter, torch.Tensor] = {}
            parts = []
            for piece in pools.pieces:
                for rows in rows_of_rollouts(piece):
                    if _pools(piece).number_B[rows.start] == number:
                        parts.append(self._sum_up(one_rollout(piece, rows), mean[None], loss, stats, sums))
            factor_K = baseline_factors(parts, mean[None], stats)
            for parameter, sums_K in sums.items():
                add_to_grad(parameter, torch.tensordot(factor_K.to(sums_K.dtype), sums_K, 1))

    def _sum_up(
        self,
        rollout: MicroBatch,
        mean_1: torch.Tensor,
        loss: LossConfig,
        stats: Stats,
        sums: dict[nn.Parameter, torch.Tensor],
    ) -> RolloutResults:
        """Add the gradients of one rollout to the sums of its pool."""
        gradients, loss_1 = self.of_rollout(rollout, loss, stats)
        reward_1 = rollout.advantages_B[:1]
        number_1 = torch.zeros_like(reward_1, dtype=torch.int64)
        factors = basis_of(reward_1, number_1, mean_1)[:, 0].tolist()
        for parameter, gradient in gradients.items():
            if parameter not in sums:
                sums[parameter] = gradient.new_zeros(len(factors), *gradient.shape)
            add_times(sums[parameter], gradient, factors)
        return RolloutResults(reward_1, number_1, norm_sq(gradients)[None], loss_1[None])

    def of_rollout(
        self, rollout: MicroBatch, loss: LossConfig, stats: Stats
    ) -> tuple[dict[nn.Parameter, torch.Tensor], torch.Tensor]:
        """Return the gradients and the loss of one rollout at an advantage of 1."""
        logp, entropy, _ = self.logp(rollout)
        weights, _ = correction_weights(rollout, loss, logp, stats)
        total = -(weights * rollout.mask_BT[:, 1:] * logp).sum() * rollout.row_weight_B[0].to(logp.dtype)
        gradients = torch.autograd.grad(total, self.params, allow_unused=True)
        book(stats, rollout, logp, entropy)
        return {p: g for p, g in zip(self.params, gradients, strict=True) if g is not None}, total.detach()


def norm_sq(gradients: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()


class Batched:
    """One backward pass for all rollouts of a micro-batch, in B below.

    `whole` runs computations that need the model's weights; `give` receives gradients.
    """

    def __init__(
        self,
        causal_lm: Any,
        distribution: TokenDistribution,
        autocast: Callable[[], Any],
        whole: Callable[[Callable[[], Any]], Any] = lambda compute: compute(),
        give: Give = add_to_grad,
    ) -> None:
        """Raises UnsupportedModelError."""
        self.hooks = RowHooks(causal_lm.get_decoder())
        self.head = RowHead(causal_lm.get_output_embeddings(), distribution)
        self.autocast, self.whole, self.give = autocast, whole, give
        self._parts: list[RolloutResults] = []
        self._later: list[tuple[torch.Tensor, Term]] = []
        """Terms of the current block, with the basis of their rows' coefficients."""
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        """Sums over the basis, [P + 1, ...], for terms that would hold too much until the end of the block."""

    def add(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        """Give gradients, at the latest with the last micro-batch of a block. Errors: as `RowByRow.add`."""
        pools = _pools(batch)
        if batch is pools.pieces[0]:
            self._parts, self._later, self._sums = [], [], {}
        rewards_B = first_rows(batch.advantages_B, batch.rollout_B)
        number_B = first_rows(pools.number_B, batch.rollout_B)
        basis_KB = basis_of(rewards_B, number_B, pools.mean_P)
        terms, loss_B = self.of_rollouts(batch, loss, stats, basis_KB)
        norm_sq_B = torch.stack([term.square_B for term in terms]).sum(0)
        self._parts.append(RolloutResults(rewards_B, number_B, norm_sq_B, loss_B))
        for term in terms:
            if pools.fits and term.weighted is not None:
                self._later.append((basis_KB, term))
            elif term.parameter in self._sums:
                self._sums[term.parameter] += term.over(basis_KB)
            else:
                self._sums[term.parameter] = term.over(basis_KB)
        if batch is pools.pieces[-1]:
            parts, self._parts = self._parts, []
            self._finish(baseline_factors(parts, pools.mean_P, stats))

    def _finish(self, factor_K: torch.Tensor) -> None:
        while self._later:
            basis_KB, term = self._later.pop()
            assert term.weighted is not None
            self.give(term.parameter, term.weighted(factor_K @ basis_KB))
        sums, self._sums = self._sums, {}
        for parameter, sums_K in sums.items():
            self.give(parameter, torch.tensordot(factor_K.to(sums_K.dtype), sums_K, 1))

    def of_rollouts(
        self, batch: MicroBatch, loss: LossConfig, stats: Stats, basis_KB: torch.Tensor
    ) -> tuple[list[Term], torch.Tensor]:
        """Return the terms of all parameters, and the losses [B] at an advantage of 1."""
        mask = batch.mask_BT[:, 1:]
        with self.hooks.watching(len(mask), batch.rollout_B) as terms:
            states_NH, tokens, head = self.whole(partial(self._forward, batch))
            logp, entropy = batch.spread(head.logp_N), batch.spread(head.entropy_N)
            weights, _ = correction_weights(batch, loss, logp, stats)
            coefficient_BT = -(mask * weights * batch.row_weight_B.to(logp.dtype)[:, None])
            tokens = replace(tokens, coefficient_N=batch.sampled(coefficient_BT))
            if states_NH.requires_grad:
                states_NH.backward(head.states_gradient_NH * tokens.coefficient_N[:, None].to(states_NH.dtype))
            terms += self.hooks.of_scales()
            if self.head.weight is not None:
                embedded = self.hooks.embedded(self.head.weight)
                with self.autocast():
                    terms.append(self.whole(partial(self.head.term, head, tokens, basis_KB, embedded)))
        book(stats, batch, logp, entropy)
        return terms, sum_by_rollout((coefficient_BT * logp).sum(1), batch.rollout_B)

    def _forward(self, batch: MicroBatch) -> tuple[torch.Tensor, Tokens, HeadPass]:
        targets_N = batch.sampled(batch.input_ids_BT[:, 1:])
        row_N = batch.sampled_N // (batch.mask_BT.shape[1] - 1)
        rollout_N = row_N if batch.rollout_B is None else batch.rollout_B[row_N]

        def body(**inputs: Any) -> torch.Tensor:
            states: torch.Tensor = self.hooks.body(**inputs).last_hidden_state
            return states

        with self.autocast():
            states_NH, _ = predictions(body, batch, torch.float32)
            context = self.head.distribution.context(batch.input_ids_BT, batch.mask_BT)
            tokens = Tokens(states_NH.detach(), targets_N, rollout_N, rollout_N.to(states_NH.dtype), context)
            return states_NH, tokens, self.head(tokens)


def alone_is_faster(pools: Pools) -> bool:
    """Return whether `RowByRow` is the faster strategy for a block.

    On a CPU it is for long rows, and anywhere for rollouts of several segments: `Batched` pads each to the most
    segments.
    """
    pieces = [piece.input_ids_BT for piece in pools.pieces]
    long = sum(ids.numel() for ids in pieces) >= ALONE_TOKENS * sum(len(ids) for ids in pieces)
    several = any(piece.rollout_B is not None for piece in pools.pieces)
    return several or (long and pieces[0].is_cpu)


def rows_of_rollouts(batch: MicroBatch) -> list[slice]:
    """Return the rows of each rollout."""
    counts = [1] * len(batch.mask_BT) if batch.rollout_B is None else batch.rollout_B.bincount().tolist()
    stops = list(accumulate(counts))
    return [slice(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def one_rollout(batch: MicroBatch, rows: slice) -> MicroBatch:
    """Return the rows of one rollout, cut after the last action token."""
    length = int(batch.mask_BT[rows].any(0).nonzero().max()) + 1
    return MicroBatch(
        input_ids_BT=batch.input_ids_BT[rows, :length],
        mask_BT=batch.mask_BT[rows, :length],
        sampler_logp_BT=batch.sampler_logp_BT[rows, :length],
        advantages_B=batch.advantages_B[rows],
        row_weight_B=batch.row_weight_B[rows],
        rollout_B=None if batch.rollout_B is None else batch.rollout_B[rows] - batch.rollout_B[rows.start],
    )


def _pools(batch: MicroBatch) -> Pools:
    assert batch.pools is not None
    return batch.pools


def exactly_batched(
    causal_lm: Any, row_by_row: RowByRow, distribution: TokenDistribution, autocast: Callable[[], Any]
) -> Batched:
    """Return `Batched`; dropout must be off.

    Raises UnsupportedModelError, also if a trial's norms differ from `row_by_row`.
    """
    body, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModelError(f"its head is a {type(head).__name__}")
    if not {*body.parameters(), head.weight}.issuperset(row_by_row.params):
        raise UnsupportedModelError("it has trainable parameters outside of its decoder and head")
    batched = Batched(causal_lm, distribution, autocast)
    try:
        together, apart = _trial(batched, row_by_row)
    except RuntimeError as error:
        raise UnsupportedModelError(str(error)) from None
    if not torch.allclose(together, apart, rtol=3e-2):
        raise UnsupportedModelError(f"a trial gave norms of {together.tolist()} instead of {apart.tolist()}")
    return batched


def _trial(batched: Batched, row_by_row: RowByRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Return squared norms of three rows, batched and row by row."""
    device = batched.head.head.weight.device
    ids_BT = (torch.arange(3 * 8, device=device).view(3, 8) * 7 + 1) % batched.head.distribution.n_tokens
    mask_BT = torch.arange(8, device=device) >= torch.tensor([3, 3, 4], device=device)[:, None]
    mask_BT[1, 5:] = False
    ones_B = torch.ones(3, dtype=torch.float64, device=device)
    batch = MicroBatch(ids_BT, mask_BT, torch.zeros_like(ids_BT, dtype=torch.float32), ones_B, ones_B)
    loss = LossConfig(policy_loss=Plain())
    terms, _ = batched.of_rollouts(batch, loss, Stats(), ones_B[None])
    apart = [norm_sq(row_by_row.of_rollout(one_rollout(batch, slice(b, b + 1)), loss, Stats())[0]) for b in range(3)]
    return torch.stack([term.square_B for term in terms]).sum(0).float(), torch.stack(apart).float()
