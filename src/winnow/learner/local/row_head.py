"""A language model's head with gradients per row."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from .grad_norms import Term, add_times, padded, product_term
from .logprob import CHUNK_ELEMENTS, Context, TokenDistribution, at_least_float32, of_tokens

Embedded = tuple[torch.Tensor, torch.Tensor]
"""Ids [B, T] and gradients [B, T, H] at the embedding, when its weight is the head's."""


@dataclass(frozen=True)
class Tokens:
    """N tokens of B rows, in row order."""

    states_NH: torch.Tensor
    """Hidden state that predicts each token."""
    targets_N: torch.Tensor
    row_N: torch.Tensor
    """Row of each token; its rollout, where rollouts have several rows."""
    coefficient_N: torch.Tensor
    """Coefficient of a token's log-probability in the loss."""
    context: Context | None = None

    def part(self, some: slice) -> Tokens:
        context = None if self.context is None else self.context.part(some)
        return Tokens(self.states_NH[some], self.targets_N[some], self.row_N[some], self.coefficient_N[some], context)

    def split(self, size: int) -> list[Tokens]:
        return [self.part(slice(start, start + size)) for start in range(0, len(self.row_N), size)]


@dataclass
class HeadPass:
    """Log-probabilities of N tokens, and the inputs of their gradients."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    states_gradient_NH: torch.Tensor
    """Gradient of each token's log-probability with respect to its hidden state."""
    logits_gradient_NV: torch.Tensor | None
    """Gradient with respect to the logits; None when all tokens are too many to hold it."""


class RowHead:
    """The head, with per-row gradients. Splits tokens into chunks as `token_logp` does."""

    def __init__(self, head: Any, distribution: TokenDistribution) -> None:
        self.head = head
        self.distribution = distribution
        self.weight: Any = head.weight if head.weight.requires_grad else None
        """The weight between passes; None when it is not trained."""

    @property
    def _at_once(self) -> int:
        return max(1, CHUNK_ELEMENTS // self.distribution.n_tokens)

    def __call__(self, tokens: Tokens) -> HeadPass:
        pieces = tokens.split(self._at_once)
        if len(pieces) == 1:
            return self._part(tokens)
        parts = [replace(self._part(some), logits_gradient_NV=None) for some in pieces]
        logp_N = torch.cat([part.logp_N for part in parts])
        entropy_N = torch.cat([part.entropy_N for part in parts])
        return HeadPass(logp_N, entropy_N, torch.cat([part.states_gradient_NH for part in parts]), None)

    @torch.enable_grad()
    def _part(self, tokens: Tokens) -> HeadPass:
        states = tokens.states_NH.detach().requires_grad_()
        fixed = {name: p.detach() for name, p in self.head.named_parameters()}
        raw_NV = torch.func.functional_call(self.head, fixed, (states,))
        logp_N, entropy_N, _ = of_tokens(raw_NV, tokens.targets_N, self.distribution, tokens.context)
        to_states, to_logits = torch.autograd.grad(logp_N.sum(), [states, raw_NV])
        return HeadPass(logp_N.detach(), entropy_N.detach(), to_states, to_logits)

    def term(self, head: HeadPass, tokens: Tokens, basis_KB: torch.Tensor, embedded: Embedded | None) -> Term:
        """Return the head's term. With a tied embedding, squared norms include twice the product of both gradients."""
        y_NV = head.logits_gradient_NV
        if y_NV is None:
            return self._term_by_rows(tokens, basis_KB, embedded)
        x_NH = (tokens.states_NH * tokens.coefficient_N[:, None]).to(y_NV.dtype)
        x_BAH, y_BAV = padded(x_NH, tokens.row_N), padded(y_NV, tokens.row_N)
        term = product_term(self.weight, y_BAV, x_BAH)
        return term if embedded is None else replace(term, square_B=term.square_B + _shared(x_BAH, y_BAV, *embedded))

    def _term_by_rows(self, tokens: Tokens, basis_KB: torch.Tensor, embedded: Embedded | None) -> Term:
        """Return the head's term, recomputing logits row by row."""
        wide = at_least_float32(tokens.states_NH[:0])
        sums_KVH, squares = wide.new_zeros(len(basis_KB), *self.head.weight.shape), []
        ends = torch.bincount(tokens.row_N, minlength=basis_KB.shape[1]).cumsum(0).tolist()
        for row, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            product_VH, square = torch.zeros_like(sums_KVH[0]), wide.new_zeros(())
            for some in tokens.part(slice(start, end)).split(self._at_once):
                y_AV = self._part(some).logits_gradient_NV
                assert y_AV is not None
                x_AH = (some.states_NH * some.coefficient_N[:, None]).to(y_AV.dtype)
                product_VH += y_AV.t() @ x_AH
                if embedded is not None:
                    ids_BT, g_BTH = embedded
                    square = square + _shared(x_AH[None], y_AV[None], ids_BT[row, None], g_BTH[row, None])[0]
            squares.append(square + product_VH.square().sum())
            add_times(sums_KVH, product_VH, basis_KB[:, row].tolist())
        return Term(self.weight, torch.stack(squares), None, sums_KVH)


def _shared(x_BAH: torch.Tensor, y_BAV: torch.Tensor, ids_BT: torch.Tensor, g_BTH: torch.Tensor) -> torch.Tensor:
    """Return twice the product of Y'X with the sum of the rows of `g` at their ids, [B]."""
    at_ids = y_BAV.gather(2, ids_BT[:, None].expand(-1, y_BAV.shape[1], -1))
    return 2 * (at_least_float32(at_ids) * at_least_float32(torch.bmm(x_BAH, g_BTH.mT.to(x_BAH.dtype)))).sum((1, 2))
