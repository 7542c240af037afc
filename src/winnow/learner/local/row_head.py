"""The head of a language model, with its gradients row by row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .grad_norms import product_term
from .logprob import CHUNK_ELEMENTS, Context, TokenDistribution, at_least_float32, of_tokens
from .row_sums import Rows, RowSums

Embedded = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Tokens:
    """N tokens of a few rows, in order of rows."""

    states_NH: torch.Tensor
    """Hidden state that each token is predicted from."""
    targets_N: torch.Tensor
    row_N: torch.Tensor
    coefficient_N: torch.Tensor
    """Coefficient of a token's log-probability in the loss."""
    context: Context | None = None

    def part(self, some: slice) -> Tokens:
        context = None if self.context is None else self.context.part(some)
        return Tokens(self.states_NH[some], self.targets_N[some], self.row_N[some], self.coefficient_N[some], context)

    def split(self, size: int) -> list[Tokens]:
        return [self.part(slice(start, start + size)) for start in range(0, len(self.row_N), size)]

    def by_row(self, to_logits_NV: torch.Tensor, start: int, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """States times coefficients [b, A, H], and gradients with respect to the logits [b, A, V]; 0 beyond the last.

        These are the tokens of the rows from `start` on, which end at `ends[1:]`.
        """
        row_N = self.row_N - start
        place_N = torch.arange(ends[0], ends[-1], device=row_N.device) - torch.tensor(ends, device=row_N.device)[row_N]
        x_NH = (self.states_NH * self.coefficient_N[:, None]).to(to_logits_NV.dtype)
        shape = len(ends) - 1, max(b - a for a, b in itertools.pairwise(ends))
        found = []
        for values in (x_NH, to_logits_NV):
            padded = values.new_zeros(*shape, values.shape[1])
            padded[row_N, place_N] = values
            found.append(padded)
        return found[0], found[1]


@dataclass
class HeadPass:
    """Log-probabilities of N tokens, and what their gradients need."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    states_gradient_NH: torch.Tensor
    """Gradient of each token's log-probability with respect to its hidden state."""
    logits_gradient_NV: torch.Tensor | None
    """Gradient with respect to the logits; None when all tokens are too many to hold it."""


class RowHead:
    """Tokens are cut where they would be too many at once, as `token_logp` cuts them."""

    def __init__(self, head: Any, distribution: TokenDistribution) -> None:
        self.head = head
        self.distribution = distribution
        self.weight: Any = head.weight if head.weight.requires_grad else None
        """As it is between passes; None when it is not trained."""

    @property
    def _at_once(self) -> int:
        return max(1, CHUNK_ELEMENTS // self.distribution.n_tokens)

    def __call__(self, tokens: Tokens) -> HeadPass:
        pieces = tokens.split(self._at_once)
        if len(pieces) == 1:
            return HeadPass(*self._part(tokens))
        parts = [self._part(some)[:3] for some in pieces]
        logp_N, entropy_N, to_states_NH = (torch.cat([part[k] for part in parts]) for k in range(3))
        return HeadPass(logp_N, entropy_N, to_states_NH, None)

    @torch.enable_grad()
    def _part(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        states = tokens.states_NH.detach().requires_grad_()
        fixed = {name: p.detach() for name, p in self.head.named_parameters()}
        raw_NV = torch.func.functional_call(self.head, fixed, (states,))
        logp_N, entropy_N, _ = of_tokens(raw_NV, tokens.targets_N, self.distribution, tokens.context)
        to_states, to_logits = torch.autograd.grad(logp_N.sum(), [states, raw_NV])
        return logp_N.detach(), entropy_N.detach(), to_states, to_logits

    def terms(
        self, found: HeadPass, tokens: Tokens, rows: Rows, sums: RowSums, embedded: Embedded | None
    ) -> torch.Tensor:
        """Squared norms [B] of the head's gradients; the sums go to `sums`.

        `embedded`: ids [B, T] and gradients [B, T, H] at the embedding, when its weight is the head's. The part that
        both have in the norm, twice their product, is then added; the squares of the embedding's are not.
        """
        ends = [0, *torch.bincount(tokens.row_N, minlength=len(rows)).cumsum(0).tolist()]
        squares = []
        for start, stop in self._slices(ends):
            some, part = tokens.part(slice(ends[start], ends[stop])), rows.part(start, stop)
            there = None if embedded is None else (embedded[0][start:stop], embedded[1][start:stop])
            if len(some.row_N) > self._at_once:
                squares.append(self._of_long_row(some, part, sums, there))
                continue
            held = found.logits_gradient_NV
            to_logits = self._part(some)[3] if held is None else held[ends[start] : ends[stop]]
            x_BAH, y_BAV = some.by_row(to_logits, start, ends[start : stop + 1])
            square_B = product_term(self.weight, y_BAV, x_BAH, part, sums, hold=held is not None)
            squares.append(square_B if there is None else square_B + _shared(x_BAH, y_BAV, *there))
        return torch.cat(squares)

    def _of_long_row(self, tokens: Tokens, rows: Rows, sums: RowSums, embedded: Embedded | None) -> torch.Tensor:
        """Norm term of one row with more tokens than may be held at once."""
        wide = at_least_float32(tokens.states_NH[:0]).dtype
        product_VH = torch.zeros(self.weight.shape, dtype=wide, device=tokens.row_N.device)
        square_B = product_VH.new_zeros(1)
        for some in tokens.split(self._at_once):
            y_AV = self._part(some)[3]
            x_AH = (some.states_NH * some.coefficient_N[:, None]).to(y_AV.dtype)
            product_VH += y_AV.t() @ x_AH
            if embedded is not None:
                square_B = square_B + _shared(x_AH[None], y_AV[None], *embedded)
        sums.add(self.weight, product_VH[None], rows)
        return square_B + product_VH.square().sum()

    def _slices(self, ends: list[int]) -> Iterator[tuple[int, int]]:
        """Rows with at most as many tokens as may be held at once, padded; or one row."""
        start, longest = 0, 0
        for row in range(len(ends) - 1):
            count = ends[row + 1] - ends[row]
            longest = max(longest, count)
            if row > start and (row + 1 - start) * longest > self._at_once:
                yield start, row
                start, longest = row, count
        yield start, len(ends) - 1


def _shared(x_BAH: torch.Tensor, y_BAV: torch.Tensor, ids_BT: torch.Tensor, g_BTH: torch.Tensor) -> torch.Tensor:
    """Twice the product of Y'X with the sum of the rows of `g` at their ids, [B]."""
    at_ids = y_BAV.gather(2, ids_BT[:, None].expand(-1, y_BAV.shape[1], -1))
    return 2 * (at_least_float32(at_ids) * at_least_float32(torch.bmm(x_BAH, g_BTH.mT.to(x_BAH.dtype)))).sum((1, 2))
