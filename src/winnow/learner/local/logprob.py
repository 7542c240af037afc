"""Log-probabilities of tokens under the policy, without holding [B, T, V]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from ...base.nucleus import lowest_kept, relative_weights
from ...base.repetition import penalized, seen
from .vocabulary import sliced_logp

CHUNK_ELEMENTS = 1 << 26
"""Logits held at once, forward or backward (256 MiB in float32)."""


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Context:
    """Preceding tokens of each of N tokens: the first `before_N` of row `row_N` of `ids_BT`."""

    ids_BT: torch.Tensor
    row_N: torch.Tensor
    before_N: torch.Tensor

    @classmethod
    def of(cls, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> Context:
        """Return the context of the tokens in a mask, whose first column is False."""
        row_N, before_N = mask_BT.nonzero(as_tuple=True)
        return cls(ids_BT, row_N, before_N)

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
        """Return the context of the tokens in a mask, if it matters."""
        return None if self.repetition_penalty == 1 else Context.of(ids_BT, mask_BT)

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


def in_the_type_of_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in autocast's dtype for factors of a matrix product."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


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
    hidden_NH: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    targets_N: torch.Tensor,
    distribution: TokenDistribution,
    context: Context | None = None,
    *,
    squares: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probability (nats) of each target, entropy and sum of squares of each distribution, as `of_tokens`.

    `head` maps [n, H] to raw logits [n, V]. A plain matrix is processed in slices of the vocabulary unless a filter
    needs all of it. Otherwise positions go through `head` in chunks of at most `CHUNK_ELEMENTS` logits; with several
    chunks, the backward pass recomputes them.
    """
    if type(head) is torch.nn.Linear and head.bias is None and distribution.plain:
        hidden, weight = in_the_type_of_autocast(hidden_NH, head.weight[: distribution.n_tokens])
        return sliced_logp(hidden, weight, targets_N, distribution.temperature, squares=squares)

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
