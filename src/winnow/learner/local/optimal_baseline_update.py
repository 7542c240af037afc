"""Updates whose baselines depend on the gradients of the rollouts themselves (OPOB; VCPO, sections 3.3 and 3.4).

The authors run one backward pass a rollout and keep two sums of gradients, one weighted with rewards and one not;
the baseline is subtracted at the end. Here one backward pass serves all rollouts of a micro-batch, wherever each
trainable parameter's gradient can be told apart by rows (`grad_norms`); else, and where rollouts are long, it is done
as the authors do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ...methods.advantage import optimal_baseline
from ...methods.loss import LossConfig
from ..base import Stats
from ..batch import MicroBatch, Pools, SharedPrompts
from .forward import predictions, selected
from .grad_norms import RowHooks, UnsupportedModelError
from .logprob import TokenDistribution
from .row_head import HeadPass, RowHead, Tokens
from .row_sums import Rows, RowSums
from .update_stats import Logp, book, correction_weights, spread

ALONE_TOKENS = 300
"""Mean length of rows, padded, from which a backward pass for each of them is no slower on a CPU: measured with models
of 0.7M and 25M parameters, it lies between 150 and 400. It also takes a fraction of the memory. Other devices were not
measured; there a row alone may leave most of a device idle."""


SHARED_PRODUCTS = 4e9
"""Multiply-adds of one pass over the prompts of a micro-batch from which they are computed once. That takes a backward
pass for each sibling: measured on a CPU, at 5e9 (25M parameters) it saves 6 to 9%, at 3e8 (0.7M) it costs 20%."""


class PooledGradients(Protocol):
    def add(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        """Add to `.grad` what a micro-batch with pools contributes, at the latest with the last of its block.

        Raises FloatingPointError when a norm or a loss is not finite.
        """
        ...


Give = Callable[[nn.Parameter, torch.Tensor], None]
"""Takes a part of a parameter's gradient."""


def add_to_grad(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(gradient)


def _as_it_is(compute: Callable[[], Any]) -> Any:
    return compute()


class RowByRow:
    """One backward pass for each row, pool by pool: for every model, whatever its parameters are."""

    def __init__(self, params: list[nn.Parameter], logp: Logp) -> None:
        self.params = params
        self.logp = logp

    def add(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        pools = _pools(batch)
        if batch is not pools.pieces[-1]:
            return
        for number, mean in enumerate(pools.mean_P):
            rows = [
                one_row(piece, b)
                for piece in pools.pieces
                for b in (_pools(piece).number_B == number).nonzero()[:, 0].tolist()
            ]
            rewards_B = torch.cat([row.advantages_B for row in rows])
            number_B = torch.zeros_like(rewards_B).long()
            slots = Slots.of(number_B, rewards_B, mean[None])
            sums, where = RowSums(slots.count), slots.rows(0, number_B, rewards_B)
            found = [self.of_row(row, loss, stats, where.part(b, b + 1), sums) for b, row in enumerate(rows)]
            norm_sq_B, loss_B = (torch.stack(values) for values in zip(*found, strict=True))
            finish(Found(slots, rewards_B, number_B, norm_sq_B, loss_B), sums, [], stats, add_to_grad)

    def of_row(
        self, row: MicroBatch, loss: LossConfig, stats: Stats, where: Rows, sums: RowSums
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared gradient norm and loss at an advantage of 1."""
        logp, entropy, _ = self.logp(row)
        weights, _ = correction_weights(row, loss, logp, stats)
        total = -(weights * row.mask_BT[:, 1:] * logp).sum() * row.row_weight_B[0].to(logp.dtype)
        gradients = torch.autograd.grad(total, self.params, allow_unused=True)
        found = [(p, g) for p, g in zip(self.params, gradients, strict=True) if g is not None]
        for p, g in found:
            sums.add(p, g[None], where)
        book(stats, row, logp, entropy)
        return torch.stack([g.square().sum() for _, g in found]).sum(), total.detach()


class Batched:
    """One backward pass for all rows of a micro-batch.

    What needs the model's weights is run by `whole`; gradients go to `give`.
    """

    def __init__(
        self,
        causal_lm: Any,
        distribution: TokenDistribution,
        autocast: Callable[[], Any],
        whole: Callable[[Callable[[], Any]], Any] = _as_it_is,
        give: Give = add_to_grad,
    ) -> None:
        """Raises UnsupportedModelError."""
        self.share = False
        """Whether prompts may be computed once."""
        self.hooks = RowHooks(causal_lm.get_decoder())
        self._products = sum(m.weight.numel() for m in self.hooks.body.modules() if isinstance(m, nn.Linear))
        self.head = RowHead(causal_lm.get_output_embeddings(), distribution)
        self.autocast, self.whole, self.give = autocast, whole, give
        self._parts: list[Found] = []
        self._sums = RowSums(0)

    def add(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        pools, rewards_B = _pools(batch), batch.advantages_B
        if batch is pools.pieces[0]:
            numbers = torch.cat([_pools(piece).number_B for piece in pools.pieces])
            self._slots = Slots.of(numbers, torch.cat([piece.advantages_B for piece in pools.pieces]), pools.mean_P)
            self._parts, self._sums = [], RowSums(self._slots.count)
        rows = self._slots.rows(len(self._parts), pools.number_B, rewards_B)
        worth = batch.shared is not None and batch.shared.tokens * self._products >= SHARED_PRODUCTS
        norm_sq_B, loss_B = self.of_rows(batch, loss, stats, rows, self._sums, share=self.share and worth)
        self._parts.append(Found(self._slots, rewards_B, pools.number_B, norm_sq_B, loss_B))
        if not pools.fits:
            self._sums.settle(rows)
        if batch is pools.pieces[-1]:
            lengths = [len(part.rewards_B) for part in self._parts]
            parts, sums, self._parts, self._sums = self._parts, self._sums, [], RowSums(0)
            finish(joined(parts), sums, lengths, stats, self.give)

    def of_rows(
        self, batch: MicroBatch, loss: LossConfig, stats: Stats, rows: Rows, sums: RowSums, *, share: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared gradient norms and losses at an advantage of 1, both [B]. `share`: compute prompts once."""
        mask, handover = batch.mask_BT[:, 1:], Handover()
        shared = batch.shared if share else None
        with self.hooks.watching(rows, sums) as squares:
            states_NH, tokens, head = self.whole(partial(self._forward, batch, shared, handover))
            logp, entropy = spread(mask, head.logp_N), spread(mask, head.entropy_N)
            weights, _ = correction_weights(batch, loss, logp, stats)
            coefficient_BT = -(mask * weights * batch.row_weight_B.to(logp.dtype)[:, None])
            tokens = replace(tokens, coefficient_N=coefficient_BT[mask])
            if states_NH.requires_grad:
                states_NH.backward(head.states_gradient_NH * tokens.coefficient_N[:, None].to(states_NH.dtype))
            if shared is not None:
                for some in one_of_each(shared.prompt_B):
                    handover.backward(some)
                    self.hooks.passed(some, shared.prompt_B)
                squares += self.hooks.of_shared(rows, sums)
            squares += self.hooks.of_scales(rows, sums)
            if self.head.weight is not None:
                embedded = self.hooks.embedded(self.head.weight)
                with self.autocast():
                    squares.append(self.whole(partial(self.head.terms, head, tokens, rows, sums, embedded)))
        book(stats, batch, logp, entropy)
        return torch.stack(squares).sum(0), (coefficient_BT * logp).sum(1)

    def _forward(
        self, batch: MicroBatch, shared: SharedPrompts | None, handover: Handover
    ) -> tuple[torch.Tensor, Tokens, HeadPass]:
        mask, targets = batch.mask_BT[:, 1:], batch.input_ids_BT[:, 1:]
        row_N = mask.nonzero()[:, 0]

        def body(**inputs: Any) -> torch.Tensor:
            cache = inputs.get("past_key_values")
            before = shared is not None and cache is not None and not cache.get_seq_length()
            with self.hooks.over_prompts(shared) if shared and before else nullcontext():
                states: torch.Tensor = self.hooks.body(**inputs).last_hidden_state
            return states

        with self.autocast():
            states_NH = predictions(body, batch, share=shared is not None, handed=handover)
            context = self.head.distribution.context(batch.input_ids_BT, batch.mask_BT)
            tokens = Tokens(states_NH.detach(), targets[mask], row_N, row_N.to(states_NH.dtype), context)
            return states_NH, tokens, self.head(tokens)


class Handover:
    """What rows take of the prompts that they share, cut off there, so that gradients can go on row by row."""

    def __init__(self) -> None:
        self._cuts: list[tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]] = []

    def __call__(self, of_prompts: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
        taken = selected(of_prompts.detach(), index)
        if of_prompts.requires_grad:
            self._cuts.append((of_prompts, index, taken.requires_grad_()))
        return taken

    def backward(self, rows: torch.Tensor) -> None:
        """Go back from what these rows have taken, one row of a prompt at most, through their prompts."""
        gradients = []
        for of_prompts, index, taken in self._cuts:
            gradient = torch.zeros_like(of_prompts)
            if taken.grad is not None:
                gradient[tuple(some[rows] for some in index)] = taken.grad[rows]
            gradients.append(gradient)
        torch.autograd.backward([cut[0] for cut in self._cuts], gradients, retain_graph=True)


def one_of_each(prompt_B: torch.Tensor) -> list[torch.Tensor]:
    """All rows, in parts in which no prompt comes twice."""
    place_B = (torch.tril(prompt_B[:, None] == prompt_B, diagonal=-1)).sum(1)
    return [(place_B == k).nonzero()[:, 0] for k in range(int(place_B.max()) + 1)]


class ByLength:
    """Blocks of long rows one row at a time (on a CPU), others all at once: whichever is faster."""

    def __init__(self, batched: Batched, row_by_row: RowByRow) -> None:
        self.batched = batched
        self.row_by_row = row_by_row

    def add(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        pieces = [piece.input_ids_BT for piece in _pools(batch).pieces]
        long = sum(ids.numel() for ids in pieces) >= ALONE_TOKENS * sum(len(ids) for ids in pieces)
        way = self.row_by_row if long and batch.input_ids_BT.is_cpu else self.batched
        way.add(batch, loss, stats)


@dataclass(frozen=True)
class Slots:
    """Sums of gradients that let the baselines be chosen afterwards.

    Rows of one pool with the same reward will have the same advantage: if there are few rewards, one sum for each of
    them. Else one for each pool, and one over all rows that is weighted with reward less mean reward.
    """

    mean_P: torch.Tensor
    pool_K: torch.Tensor | None
    reward_K: torch.Tensor

    @classmethod
    def of(cls, number_B: torch.Tensor, rewards_B: torch.Tensor, mean_P: torch.Tensor) -> Slots:
        kinds_K2 = torch.stack([number_B.double(), rewards_B], dim=1).unique(dim=0)
        few = len(kinds_K2) <= max(2 * len(mean_P), 2)
        return cls(mean_P, kinds_K2[:, 0].long() if few else None, kinds_K2[:, 1])

    @property
    def count(self) -> int:
        return 1 + len(self.mean_P) if self.pool_K is None else len(self.pool_K)

    def rows(self, piece: int, number_B: torch.Tensor, rewards_B: torch.Tensor) -> Rows:
        if self.pool_K is None:
            return Rows(piece, 0, number_B, rewards_B - self.mean_P[number_B])
        same_BK = (self.pool_K == number_B[:, None]) & (self.reward_K == rewards_B[:, None])
        return Rows(piece, 0, same_BK.int().argmax(1))

    def factors(self, baseline_P: torch.Tensor) -> torch.Tensor:
        """Factors of the sums, so that they add up to rewards less baselines."""
        if self.pool_K is None:
            return torch.cat([self.mean_P - baseline_P, baseline_P.new_ones(1)])
        return self.reward_K - baseline_P[self.pool_K]


@dataclass(frozen=True)
class Found:
    """Gradients and rewards of the rows of some pools, as far as they are known."""

    slots: Slots
    rewards_B: torch.Tensor
    number_B: torch.Tensor
    norm_sq_B: torch.Tensor
    loss_B: torch.Tensor
    """Loss of each row if its advantage were 1."""


def joined(parts: list[Found]) -> Found:
    columns = zip(*((p.rewards_B, p.number_B, p.norm_sq_B, p.loss_B) for p in parts), strict=True)
    return Found(parts[0].slots, *(torch.cat(column) for column in columns))


def finish(found: Found, sums: RowSums, lengths: list[int], stats: Stats, give: Give) -> None:
    """Baselines, and from them the gradient. `lengths`: rows of each micro-batch that functions in `sums` refer to."""
    if not (torch.isfinite(found.norm_sq_B).all() and torch.isfinite(found.loss_B).all()):
        worst = float(found.norm_sq_B.max()) ** 0.5
        raise FloatingPointError(
            f"gradient norms up to {worst}, losses up to {float(found.loss_B.max())} of rollouts; no update was made"
        )
    rewards, norms, numbers = (x.cpu().numpy() for x in (found.rewards_B, found.norm_sq_B, found.number_B))
    baseline_B = torch.from_numpy(optimal_baseline(rewards, 0 * rewards, norms, numbers)).to(found.rewards_B)
    baseline_P = torch.zeros_like(found.slots.mean_P).index_copy_(0, found.number_B, baseline_B)
    advantage_B = found.rewards_B - baseline_B
    pieces = list(advantage_B.split(lengths)) if lengths else []
    for parameter, gradient in sums.gradient(found.slots.factors(baseline_P), pieces):
        give(parameter, gradient)
    stats.add("loss", float((advantage_B * found.loss_B).sum()))
    stats.baselines.append(baseline_P)
    stats.row_norm_B.append(found.norm_sq_B.sqrt())


def one_row(batch: MicroBatch, b: int) -> MicroBatch:
    """Row `b` alone, without what comes after its last action token."""
    length = int(batch.mask_BT[b].nonzero().max()) + 1
    return MicroBatch(
        input_ids_BT=batch.input_ids_BT[b : b + 1, :length],
        mask_BT=batch.mask_BT[b : b + 1, :length],
        sampler_logp_BT=batch.sampler_logp_BT[b : b + 1, :length],
        advantages_B=batch.advantages_B[b : b + 1],
        row_weight_B=batch.row_weight_B[b : b + 1],
    )


def _pools(batch: MicroBatch) -> Pools:
    assert batch.pools is not None
    return batch.pools


def batched_if_exact(
    causal_lm: Any,
    row_by_row: RowByRow,
    distribution: TokenDistribution,
    autocast: Callable[[], Any],
    *,
    share_prompts: bool,
) -> PooledGradients:
    """`ByLength` where the model allows it and a trial gives the same norms, else `row_by_row`, with a warning.

    Dropout must be off.
    """
    try:
        batched = exactly_batched(causal_lm, row_by_row, distribution, autocast)
        batched.share = share_prompts and _shares_exactly(batched, row_by_row)
        return ByLength(batched, row_by_row)
    except UnsupportedModelError as error:
        warnings.warn(
            f"{type(causal_lm).__name__}: the gradients of rollouts are computed one rollout at a time, which may take "
            f"twice as long as all at once: {error}",
            stacklevel=2,
        )
        return row_by_row


def exactly_batched(
    causal_lm: Any, row_by_row: RowByRow, distribution: TokenDistribution, autocast: Callable[[], Any]
) -> Batched:
    """Raises UnsupportedModelError, also when a trial does not give the norms of `row_by_row`."""
    body, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModelError(f"its head is a {type(head).__name__}")
    if not {*body.parameters(), head.weight}.issuperset(row_by_row.params):
        raise UnsupportedModelError("it has trainable parameters outside of its decoder and head")
    batched = Batched(causal_lm, distribution, autocast)
    try:
        together, apart = _trial(batched, row_by_row, share=False)
    except RuntimeError as error:
        raise UnsupportedModelError(str(error)) from None
    if not torch.allclose(together, apart, rtol=3e-2):
        raise UnsupportedModelError(f"a trial gave norms of {together.tolist()} instead of {apart.tolist()}")
    return batched


def _shares_exactly(batched: Batched, row_by_row: RowByRow) -> bool:
    if not batched.hooks.can_share:
        return False
    try:
        return torch.allclose(*_trial(batched, row_by_row, share=True), rtol=3e-2)
    except (RuntimeError, UnsupportedModelError):
        return False


def _trial(batched: Batched, row_by_row: RowByRow, *, share: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared norms of three rows, the first two with the same prompt, together and apart."""
    device = batched.head.head.weight.device
    ids_BT = (torch.arange(3 * 8, device=device).view(3, 8) * 7 + 1) % batched.head.distribution.n_tokens
    ids_BT[1, :3] = ids_BT[0, :3]
    length_B = torch.tensor([3, 3, 4], device=device)
    mask_BT = torch.arange(8, device=device) >= length_B[:, None]
    mask_BT[1, 5:] = False
    ones_B = torch.ones(3, dtype=torch.float64, device=device)
    first_U, prompt_B = torch.tensor([0, 2], device=device), torch.tensor([0, 0, 1], device=device)
    shared = SharedPrompts(first_U, prompt_B, length_B, 4, 5)
    batch = MicroBatch(ids_BT, mask_BT, torch.zeros_like(ids_BT, dtype=torch.float32), ones_B, ones_B, shared)
    loss, rows = LossConfig(policy_loss="plain"), Rows(0, 0, torch.zeros_like(ids_BT[:, 0]))
    together = batched.of_rows(batch, loss, Stats(), rows, RowSums(1), share=share)[0]
    apart = [row_by_row.of_row(one_row(batch, b), loss, Stats(), rows.part(b, b + 1), RowSums(1))[0] for b in range(3)]
    return together.float(), torch.stack(apart).float()
