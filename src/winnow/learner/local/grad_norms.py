"""Gradients of all rows of a micro-batch from one backward pass: exact norms, and any weighted sum of them.

While it runs, no weight gets a gradient. Hooks keep the input X [B, T, in] of each linear layer and the gradient
Y [B, T, out] of its output; row i's gradient of the weight is Y_i' X_i. Its squared norm is the sum over all pairs of
tokens of (x_s . x_t)(y_s . y_t) (Goodfellow 2015; "ghost norms", Li et al. 2022), cheap for few tokens, or is taken
from the product itself, cheap for many. The weighted sum over rows is then one product more, or, where the products
were made anyway, is taken from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .logprob import at_least_float32

PASS_COST = 50.0
"""Measured on a CPU: multiply-adds of a Gram matrix in whose time one number of a product is squared and added up (30
to 80; most where a sum does not fit into the cache)."""
AT_ONCE = 1 << 19
"""Numbers of products made at once, so that they are still in the cache when they are added up."""


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
        self._later: list[tuple[int, nn.Parameter, Callable[[torch.Tensor], torch.Tensor]]] = []
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

    def add_later(self, parameter: nn.Parameter, weighted: Callable[[torch.Tensor], torch.Tensor], rows: Rows) -> None:
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


def product_term(
    parameter: nn.Parameter,
    left_BTI: torch.Tensor,
    right_BTJ: torch.Tensor,
    rows: Rows,
    sums: RowSums,
    *,
    hold: bool = True,
) -> torch.Tensor:
    """Squared norms [B] of the products over T, [B, I, J] as `parameter` is; their weighted sum goes to `sums`.

    `hold`: whether both factors may be kept until then.
    """
    right_BTJ = right_BTJ.to(left_BTI.dtype)
    B, T, I_, J = *left_BTI.shape, right_BTJ.shape[-1]
    few_tokens = T * T * (I_ + J) <= PASS_COST * I_ * J
    if not hold or (not few_tokens and sums.slots * I_ * J <= B * T * (I_ + J)):
        return _made_products(parameter, left_BTI, right_BTJ, rows, sums)

    def weighted(coefficient_B: torch.Tensor) -> torch.Tensor:
        a_B11, left, right = rows.of(coefficient_B, left_BTI)[:, None, None], left_BTI, right_BTJ
        if not a_B11.all():
            there = a_B11[:, 0, 0] != 0
            a_B11, left, right = a_B11[there], left[there], right[there]
        left, right = (a_B11 * left, right) if I_ < J else (left, a_B11 * right)
        return at_least_float32(left.flatten(0, 1).t() @ right.flatten(0, 1))

    sums.add_later(parameter, weighted, rows)
    if T * (I_ + J) > I_ * J:
        return _made_products(parameter, left_BTI, right_BTJ, rows, None)
    return (at_least_float32(torch.bmm(left_BTI, left_BTI.mT)) * sums.pairs(right_BTJ)).flatten(1).sum(1)


def _made_products(
    parameter: nn.Parameter, left_BTI: torch.Tensor, right_BTJ: torch.Tensor, rows: Rows, sums: RowSums | None
) -> torch.Tensor:
    """The squared norms from the products themselves, which are added up if `sums` is given."""
    size = left_BTI.shape[-1] * right_BTJ.shape[-1]
    at_once = max(1, AT_ONCE // size)
    scratch = (sums or RowSums(0)).scratch(min(at_once, len(rows)) * size, left_BTI)
    squares = []
    for start in range(0, len(rows), at_once):
        left, right = left_BTI[start : start + at_once], right_BTJ[start : start + at_once]
        made = scratch[: len(left) * size].view(len(left), left.shape[-1], right.shape[-1])
        torch.bmm(left.mT, right, out=made)
        wide = at_least_float32(made).flatten(1)
        if sums is not None:
            sums.add(parameter, wide, rows.part(start, start + len(left)))
        squares.append(torch.linalg.vector_norm(wide, dim=1).square())
    return torch.cat(squares)


def direct_term(parameter: nn.Parameter, gradient_BX: torch.Tensor, rows: Rows, sums: RowSums) -> torch.Tensor:
    """Norm term of gradients that are small enough to be kept, [B, *parameter.shape]."""
    gradient_BX = at_least_float32(gradient_BX)

    def weighted(coefficient_B: torch.Tensor) -> torch.Tensor:
        return torch.tensordot(rows.of(coefficient_B, gradient_BX), gradient_BX, 1)

    sums.add_later(parameter, weighted, rows)
    return gradient_BX.flatten(1).square().sum(1)


def embedding_term(
    parameter: Any, ids_BT: torch.Tensor, y_BTH: torch.Tensor, rows: Rows, sums: RowSums
) -> torch.Tensor:
    """Norm term of an embedding; rows are added up where an id comes more than once in a sequence."""
    B, (V, H) = len(ids_BT), parameter.shape
    keys = torch.arange(B, device=ids_BT.device)[:, None] * V + ids_BT
    unique_U, inverse = keys.unique(return_inverse=True)
    gradient_UH = y_BTH.new_zeros(len(unique_U), H, dtype=at_least_float32(y_BTH[:0]).dtype)
    gradient_UH.index_add_(0, inverse.flatten(), y_BTH.flatten(0, 1).to(gradient_UH.dtype))
    row_U, id_U = unique_U // V, unique_U % V

    def weighted(coefficient_B: torch.Tensor) -> torch.Tensor:
        scaled = gradient_UH * rows.of(coefficient_B, gradient_UH)[row_U, None]
        return gradient_UH.new_zeros(V, H).index_add_(0, id_U, scaled)

    sums.add_later(parameter, weighted, rows)
    return gradient_UH.new_zeros(B).index_add_(0, row_U, gradient_UH.square().sum(1))


class Uses:
    """Inputs of a module and gradients of its outputs; a module may be used more than once."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []

    @property
    def complete(self) -> bool:
        return len(self.gradients) == len(self.inputs)

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Along T: the gradient is the sum over uses as it is over tokens. Last used comes first in `gradients`."""
        if len(self.inputs) == 1:
            return self.inputs[0], self.gradients[0]
        return torch.cat(self.inputs, 1), torch.cat(self.gradients[::-1], 1)


class UnsupportedModelError(Exception):
    """The model has trainable parameters that only a backward pass for each row can tell apart."""


class RowHooks:
    """Norms and sums of the gradients of the trainable parameters of `body`, one micro-batch at a time.

    Parameters are known by what they are between passes, which need not be what a pass computes with.
    """

    def __init__(self, body: nn.Module) -> None:
        """Raises UnsupportedModelError. The forward pass of `body` must take `input_ids`."""
        self.body = body
        self._trained: dict[nn.Module, dict[str, nn.Parameter]] = {}
        """The trainable parameters of modules themselves, by name."""
        self._hooked: list[nn.Module] = []
        self._scales: list[nn.Module] = []
        """Norms of other classes than LayerNorm."""
        for name, module in body.named_modules():
            own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
            if not own:
                continue
            self._trained[module] = own
            if type(module) in (nn.Linear, Conv1D, nn.Embedding, nn.LayerNorm):
                self._hooked.append(module)
            elif "Norm" in type(module).__name__ and all(p.ndim == 1 for p in own.values()):
                self._scales.append(module)
            else:
                raise UnsupportedModelError(f"{name}: {type(module).__name__}")
        self._uses: dict[nn.Module, Uses] = {}
        self._leaves: dict[nn.Parameter, torch.Tensor] = {}
        """Scales of norms, one for each row."""

    @contextmanager
    def watching(self, rows: Rows, sums: RowSums) -> Iterator[list[torch.Tensor]]:
        """Inside, no parameter of `body` gets a gradient; the squared norms [B] that its backward pass will leave."""
        squares: list[torch.Tensor] = []
        trained = {p for own in self._trained.values() for p in own.values()}
        self._uses, self._leaves = {module: Uses() for module in self._hooked}, {}
        handles: list[Any] = []
        try:
            for p in trained:
                p.requires_grad_(False)
            for module in self._hooked:
                handles.append(module.register_forward_hook(partial(self._look, rows, sums, squares)))
            for module in self._scales:
                one = _Scales(self._leaves, self._trained[module], len(rows))
                handles.append(module.register_forward_pre_hook(one.put))
                handles.append(module.register_forward_hook(one.take, always_call=True))
            yield squares
        finally:
            for p in trained:
                p.requires_grad_(True)
            for handle in handles:
                handle.remove()
            self._uses, self._leaves = {}, {}

    def _look(
        self,
        rows: Rows,
        sums: RowSums,
        squares: list[torch.Tensor],
        module: nn.Module,
        args: tuple[torch.Tensor, ...],
        output: torch.Tensor,
    ) -> torch.Tensor:
        B, uses, x = len(rows), self._uses[module], args[0].detach()
        if len(output) != B:  # positions, which all rows have in common
            output, x = output.expand(B, *output.shape[1:]), x.expand(B, *x.shape[1:])
        if not output.requires_grad:
            output.requires_grad_()
        uses.inputs.append(x)

        def keep(gradient: torch.Tensor) -> None:
            uses.gradients.append(gradient)
            if uses.complete:
                squares.append(self._terms(module, uses, rows, sums))

        output.register_hook(keep)
        return output

    def of_scales(self, rows: Rows, sums: RowSums) -> list[torch.Tensor]:
        """The squared norms that come without hooks, after the backward pass."""
        found = []
        for p, leaf in self._leaves.items():
            if leaf.grad is not None:
                found.append(direct_term(p, leaf.grad.reshape(len(rows), *p.shape), rows, sums))
        return found

    def embedded(self, parameter: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids and gradients of the embedding that has this weight, [B, T] and [B, T, H], after the backward pass."""
        for module, uses in self._uses.items():
            if isinstance(module, nn.Embedding) and self._trained[module]["weight"] is parameter:
                return _ids_and_gradient(module, uses)
        return None

    def _terms(self, module: nn.Module, uses: Uses, rows: Rows, sums: RowSums) -> torch.Tensor:
        trained = self._trained[module]
        square_B = torch.zeros(len(rows), device=rows.slot_B.device)
        weight, bias = trained.get("weight"), trained.get("bias")
        if isinstance(module, nn.Embedding):
            return square_B + embedding_term(weight, *_ids_and_gradient(module, uses), rows, sums)
        x, y = uses.joined()
        if isinstance(module, nn.LayerNorm) and weight is not None:
            normal = nn.functional.layer_norm(x, module.normalized_shape, eps=module.eps)
            square_B = square_B + direct_term(weight, (y * normal).sum(1), rows, sums)
        elif weight is not None:
            left, right = (x.to(y.dtype), y) if isinstance(module, Conv1D) else (y, x)
            square_B = square_B + product_term(weight, left, right, rows, sums)
        if bias is not None:
            square_B = square_B + direct_term(bias, at_least_float32(y).sum(1), rows, sums)
        return square_B


class _Scales:
    """Puts scales of its own for each row into a norm while that computes."""

    def __init__(self, leaves: dict[nn.Parameter, torch.Tensor], trained: dict[str, nn.Parameter], rows: int) -> None:
        self._leaves, self._trained, self._rows = leaves, trained, rows
        self._usual: dict[str, nn.Parameter | None] = {}

    def put(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._usual = {name: module._parameters[name] for name in self._trained}
        for name, p in self._trained.items():
            if p not in self._leaves:
                whole = getattr(module, name).detach()
                shape = self._rows, *(1,) * (args[0].ndim - 2), len(whole)
                self._leaves[p] = whole.expand(shape).clone().requires_grad_()
            module._parameters[name] = self._leaves[p]  # type: ignore[assignment]

    def take(self, module: nn.Module, *_: object) -> None:
        module._parameters.update(self._usual)


def _ids_and_gradient(module: nn.Embedding, uses: Uses) -> tuple[torch.Tensor, torch.Tensor]:
    ids_BT, y_BTH = uses.joined()
    if module.padding_idx is not None:  # which an embedding never learns
        y_BTH = y_BTH.masked_fill((ids_BT == module.padding_idx)[..., None], 0)
    return ids_BT, y_BTH
