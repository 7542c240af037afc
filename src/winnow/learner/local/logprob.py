"""Log-probabilities of tokens under the policy, without holding [B, T, V]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ...base.token_filters import lowest_kept, penalized, relative_weights, seen
from .compiled import compiled

CHUNK_ELEMENTS = 1 << 26
"""Logits held at once, forward or backward (256 MiB in float32)."""
SLICE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits of a slice of the vocabulary, by device. On a CPU (16 MiB in float32) larger slices overflow the cache and
smaller ones make narrow products, measured; on a GPU (256 MiB) each slice costs launches."""


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Context:
    """Preceding tokens of each of N tokens: the first `before_N` of row `row_N` of `ids_BT`."""

    ids_BT: torch.Tensor
    row_N: torch.Tensor
    before_N: torch.Tensor

    def part(self, some: slice) -> Context:
        return Context(self.ids_BT, self.row_N[some], self.before_N[some])

    def ids(self) -> torch.Tensor:
        """Return [N, L]: the tokens before each; later positions repeat the row's first token."""
        ids_NL = self.ids_BT[self.row_N]
        later_NL = torch.arange(ids_NL.shape[1], device=ids_NL.device) >= self.before_N[:, None]
        return torch.where(later_NL, ids_NL[:, :1], ids_NL)


@dataclass(frozen=True)
class TokenDistribution:
    """Transform from logits to the sampling distribution; the same as the engine's.

    `n_tokens`: ids at or above it are padding of the vocabulary and have no probability.
    """

    n_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def whole(self) -> bool:
        """Return whether no id is filtered out."""
        return not self.top_k and self.top_p >= 1 and not self.min_p

    @property
    def plain(self) -> bool:
        """Return whether dividing logits by a temperature is the only transform."""
        return self.whole and self.temperature > 0 and self.repetition_penalty == 1

    def context(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> Context | None:
        """Return the context of the tokens in a mask, whose first column is False; None if it does not matter."""
        return None if self.repetition_penalty == 1 else Context(ids_BT, *mask_BT.nonzero(as_tuple=True))

    def logits(self, raw_NV: torch.Tensor, targets_N: torch.Tensor, context: Context | None = None) -> torch.Tensor:
        """Return [N, V'], float32 (float64 stays), dropped tokens at -inf; not the target: its ratio must be finite."""
        whole_NV = at_least_float32(raw_NV[:, : self.n_tokens])
        if context is not None:
            whole_NV = penalized(whole_NV, seen(context.ids(), self.n_tokens), self.repetition_penalty)
        logits = whole_NV / self.temperature if self.temperature > 0 else whole_NV
        if not self.whole:
            logits = logits.masked_fill(self._excluded(whole_NV.detach(), targets_N), -torch.inf)
        return logits

    def _excluded(self, raw_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Return the tokens that the engine drops, by its own arithmetic: float32, one rule for ties."""
        n, device = len(raw_NV), raw_NV.device
        inverse_N = torch.full((n,), 1 / self.temperature if self.temperature > 0 else 1.0, device=device)
        filters = [torch.full((n,), value, device=device) for value in (self.top_k, self.top_p, self.min_p)]
        weights_NV = relative_weights(raw_NV.float(), inverse_N)
        excluded = weights_NV < lowest_kept(weights_NV, *filters)
        return excluded.scatter(-1, targets_N[:, None], False)


def of_tokens(
    raw_NV: torch.Tensor,
    targets_N: torch.Tensor,
    distribution: TokenDistribution,
    context: Context | None = None,
    *,
    squares: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each target's log-probability, and the entropy and sum of squares of each distribution, all [N].

    The sum of squares is 0 unless requested, and never has a gradient.
    """
    logp = distribution.logits(raw_NV, targets_N, context).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)
    squared = (2 * logp.detach()).exp().sum(-1) if squares else torch.zeros_like(entropy.detach())
    return logp.gather(-1, targets_N[:, None])[:, 0], entropy, squared


def token_logp(
    hidden_PH: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    targets_N: torch.Tensor,
    distribution: TokenDistribution,
    context: Context | None = None,
    *,
    state_N: torch.Tensor | None = None,
    squares: bool = False,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probability (nats) of each target, entropy and sum of squares of each distribution, as `of_tokens`.

    `state_N`: row of `hidden_PH` that predicts each target; None: each has its own. `head` maps [n, H] to raw logits
    [n, V]. A plain matrix is processed in slices of the vocabulary unless a filter needs all of it. Otherwise positions
    go through `head` in chunks of at most `CHUNK_ELEMENTS` logits; with several chunks, the backward pass recomputes
    them. `fused`: passes over a slice's logits are compiled.
    """
    if type(head) is torch.nn.Linear and head.bias is None and distribution.plain:
        weight_VH = head.weight
        if len(weight_VH) > distribution.n_tokens:  # a slice has a gradient of its own, as large as the head's
            weight_VH = weight_VH[: distribution.n_tokens]
        hidden, weight, device = hidden_PH, weight_VH, hidden_PH.device.type
        if torch.is_autocast_enabled(device):
            hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
        if state_N is None:
            state_N = torch.arange(len(targets_N), device=targets_N.device)
        sliced: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Sliced.apply(
            hidden, weight, targets_N, state_N, distribution.temperature, squares, fused
        )
        return sliced
    hidden_NH = hidden_PH if state_N is None else hidden_PH[state_N]

    def chunk(some: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        before = None if context is None else context.part(some)
        return of_tokens(head(hidden_NH[some]), targets_N[some], distribution, before, squares=squares)

    widest = max(distribution.n_tokens, 0 if context is None else context.ids_BT.shape[1])
    rows = max(1, CHUNK_ELEMENTS // widest)
    if len(hidden_NH) <= rows:
        return chunk(slice(None))
    starts = range(0, len(hidden_NH), rows)
    parts = [checkpoint(chunk, slice(start, start + rows), use_reentrant=False) for start in starts]
    logp_N, entropy_N, squares_N = (torch.cat([part[k] for part in parts]) for k in range(3))
    return logp_N, entropy_N, squares_N


class _Sliced(torch.autograd.Function):
    """`of_tokens` of `hidden @ weight.T` without filters, one slice of the vocabulary at a time.

    The backward pass recomputes each slice's logits, which costs a third more products with the head. A slice's
    gradient is written once, and all other intermediate values fit the cache. A state that predicts several targets is
    multiplied once. `hidden_PH` and `weight_VH` have the compute dtype; results are float32, or float64 for float64
    input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        state_N: torch.Tensor,
        temperature: float,
        squares: bool,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if hidden_PH.dtype == torch.float64 else torch.float32
        largest = torch.full((len(hidden_PH),), -torch.inf, dtype=wide, device=hidden_PH.device)
        # Sums of e = exp(logit - largest), of e times (logit - largest), and of e squared.
        total, moment, square = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
        target = torch.zeros(len(targets_N), dtype=wide, device=hidden_PH.device)
        reduced = compiled(_reduced) if fused else _reduced
        sums = target, largest, total, moment, square
        for _, part in _slices(hidden_PH, weight_VH, targets_N, state_N, temperature):
            sums = reduced(part, sums, squares)
        target, largest, total, moment, square = sums
        log_total = total.log()
        entropy = log_total - moment / total
        ctx.save_for_backward(hidden_PH, weight_VH, targets_N, state_N, largest + log_total, entropy)
        ctx.temperature, ctx.wide, ctx.fused = temperature, wide, fused
        ctx.set_materialize_grads(False)
        squared_N = (square / total.square())[state_N]
        ctx.mark_non_differentiable(squared_N)
        return target - largest[state_N] - log_total[state_N], entropy[state_N], squared_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_PH, weight_VH, targets_N, state_N, norm_P, entropy_P = ctx.saved_tensors
        of_logp, of_entropy, _ = gradients
        if of_logp is None:
            of_logp = norm_P.new_zeros(len(targets_N))
        to_logp = torch.zeros_like(norm_P).index_add_(0, state_N, of_logp)
        to_entropy = None if of_entropy is None else torch.zeros_like(norm_P).index_add_(0, state_N, of_entropy)
        to_hidden = torch.zeros_like(hidden_PH, dtype=ctx.wide) if ctx.needs_input_grad[0] else None
        to_weight = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        gradient = compiled(_gradient) if ctx.fused else _gradient
        for start, part in _slices(hidden_PH, weight_VH, targets_N, state_N, ctx.temperature):
            y = gradient(part, of_logp, norm_P, entropy_P, to_logp, to_entropy)
            some = slice(start, start + y.shape[1])
            if to_weight is not None:
                torch.mm(y.t(), hidden_PH, out=to_weight[some])
            if to_hidden is not None:
                to_hidden += y @ weight_VH[some]
        return None if to_hidden is None else to_hidden.to(hidden_PH.dtype), to_weight, None, None, None, None, None


class _Slice(NamedTuple):
    """Logits of a slice of the vocabulary, and the targets."""

    product_PV: torch.Tensor
    """In the type of its factors."""
    column_N: torch.Tensor
    """Of each target; outside the slice if that has no such column."""
    state_N: torch.Tensor
    temperature: float

    def logits(self) -> torch.Tensor:
        """Return logits in float32 or float64, in the place of the product if that has the type."""
        logits = at_least_float32(self.product_PV)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which targets are in the slice, and their columns."""
        ids = self.product_PV.shape[1]
        return (self.column_N >= 0) & (self.column_N < ids), self.column_N.clamp(0, ids - 1)


def _slices(
    hidden_PH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    state_N: torch.Tensor,
    temperature: float,
) -> Iterator[tuple[int, _Slice]]:
    """Yield the first id of each slice, and the slice."""
    elements = SLICE_ELEMENTS.get(hidden_PH.device.type, SLICE_ELEMENTS["cpu"])
    size = max(1, elements // max(1, len(hidden_PH)))
    for start in range(0, len(weight_VH), size):
        product_PV = hidden_PH @ weight_VH[start : start + size].t()
        yield start, _Slice(product_PV, targets_N - start, state_N, temperature)


Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _reduced(part: _Slice, sums: Sums, squares: bool) -> Sums:
    """Return the sums of `_Sliced.forward` with one more slice."""
    target, before, total, moment, square = sums
    logits, (inside, here) = part.logits(), part.targets()
    target = torch.where(inside, logits[part.state_N, here], target)
    largest = torch.maximum(before, logits.amax(1))
    lower = torch.where(before == -torch.inf, 0, before - largest)
    shrink = torch.where(before == -torch.inf, 0, lower.exp())
    logits -= largest[:, None]
    e = logits.exp()
    moment = shrink * (moment + lower * total) + torch.linalg.vecdot(e, logits)
    total = shrink * total + e.sum(1)
    if squares:
        square = shrink.square() * square + torch.linalg.vecdot(e, e)
    return target, largest, total, moment, square


def _gradient(
    part: _Slice,
    of_logp: torch.Tensor,
    norm_P: torch.Tensor,
    entropy_P: torch.Tensor,
    to_logp: torch.Tensor,
    to_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the loss's gradient at a slice's product, in its type."""
    logits, (inside, here) = part.logits(), part.targets()
    logits -= norm_P[:, None]
    if to_entropy is None:
        y = logits.exp_().mul_(-to_logp[:, None])
    else:
        factor = to_logp[:, None] + to_entropy[:, None] * (logits + entropy_P[:, None])
        y = logits.exp_().mul_(-factor)
    # No boolean mask, which would make the host wait.
    y.view(-1).scatter_add_(0, part.state_N * y.shape[1] + here, torch.where(inside, of_logp, 0))
    return (y if part.temperature == 1 else y.div_(part.temperature)).to(part.product_PV.dtype)
