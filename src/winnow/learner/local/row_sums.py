"""Weighted sums of the gradients of rows, for weights that are known only afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .logprob import at_least_float32

Weighted = Callable[[torch.Tensor], torch.Tensor]
"""From coefficients [B] of the rows of a micro-batch to the weighted sum of their gradients of one parameter."""


@dataclass(frozen=True)
class Rows:
    """Some rows of one micro-batch, and where their gradients are added up."""

    piece: int
    """Number of the micro-batch."""
    start: int
    """First of these rows in the micro-batch."""
    slot_B: torch.Tensor
    """Sum that each row's gradient goes to."""
    centred_B: torch.Tensor | None = None
    """Coefficients with which it goes to the last sum, too."""

    def __len__(self) -> int:
        return len(self.slot_B)

    def part(self, start: int, stop: int) -> Rows:
        centred_B = None if self.centred_B is None else self.centred_B[start:stop]
        return Rows(self.piece, self.start + start, self.slot_B[start:stop], centred_B)

    def of(self, coefficient_B: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Coefficients of these rows from those of the micro-batch."""
        return coefficient_B[self.start : self.start + len(self)].to(like.dtype)


class RowSums:
    """Gradients of the rows of a few micro-batches, as far as they are known.

    For each parameter either sums over rows, [slots, ...], or functions from coefficients [B] of the rows of one
    micro-batch to the weighted sum, or both.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._later: list[tuple[int, nn.Parameter, Weighted]] = []
        self._scratch = torch.zeros(0)
        self._pairs: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, parameter: nn.Parameter, gradient_BX: torch.Tensor, rows: Rows) -> None:
        """Sum up gradients of each row, [B, *parameter.shape]."""
        flat = gradient_BX.reshape(len(gradient_BX), -1)
        if parameter not in self._sums:
            self._sums[parameter] = flat.new_zeros(self.slots, *parameter.shape)
        sums = self._sums[parameter].view(self.slots, -1)
        sums.index_add_(0, rows.slot_B, flat)
        if rows.centred_B is not None:
            sums[-1].addmv_(flat.t(), rows.centred_B.to(flat.dtype))

    def add_later(self, parameter: nn.Parameter, weighted: Weighted, rows: Rows) -> None:
        self._later.append((rows.piece, parameter, weighted))

    def settle(self, rows: Rows) -> None:
        """Turn the functions, all of this micro-batch, into sums, so that what they hold on to is freed."""
        while self._later:
            _, parameter, weighted = self._later.pop()
            coefficients = [(rows.slot_B == slot).double() for slot in range(self.slots)]
            if rows.centred_B is not None:
                coefficients[-1] = rows.centred_B
            found = torch.stack([weighted(c_B) for c_B in coefficients])
            self._sums[parameter] = self._sums[parameter] + found if parameter in self._sums else found

    def gradient(
        self, factor_S: torch.Tensor, coefficient_B: list[torch.Tensor]
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters and parts of their gradients, with the factors of sums, and the coefficients of micro-batches."""
        while self._later:
            piece, parameter, weighted = self._later.pop()
            yield parameter, weighted(coefficient_B[piece])
        for parameter, sums in self._sums.items():
            yield parameter, torch.tensordot(factor_S.to(sums.dtype), sums, 1)

    def pairs(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """Products of all pairs of tokens of a row, [B, T, T]; layers one after the other often have the same input."""
        if self._pairs is None or self._pairs[0].data_ptr() != x_BTI.data_ptr() or self._pairs[0].shape != x_BTI.shape:
            self._pairs = x_BTI, at_least_float32(torch.bmm(x_BTI, x_BTI.mT))
        return self._pairs[1]

    def scratch(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Memory that is used again and again."""
        if self._scratch.numel() < size or self._scratch.dtype != like.dtype:
            self._scratch = like.new_empty(size)
        return self._scratch[:size]
