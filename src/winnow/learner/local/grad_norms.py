"""Gradients of the rows of a micro-batch, or of its rollouts, from one backward pass: exact norms, any weighted sum.

No weight gets a gradient meanwhile. Hooks keep the input X [B, T, in] of each linear layer and the gradient Y
[B, T, out] of its output. Row i's weight gradient is Y_i' X_i. Its squared norm is the sum over all pairs of tokens of
(x_s . x_t)(y_s . y_t) (Goodfellow 2015; "ghost norms", Li et al. 2022), cheap for few tokens. For many tokens the
product itself is cheaper. The weighted sum over rows takes one more product.
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

from ...methods.segments import sum_by_rollout
from .logprob import at_least_float32

PASS_COST = 50
"""Multiply-adds of a matrix product in the time to square and sum one of its elements; measured on a CPU."""
AT_ONCE = 1 << 19
"""Elements of products computed at once, so that they are still cached when they are squared."""


@dataclass(frozen=True)
class Term:
    """One parameter's gradients for the rows of a micro-batch."""

    parameter: nn.Parameter
    square_B: torch.Tensor
    """Squared norm of each row's gradient."""
    weighted: Callable[[torch.Tensor], torch.Tensor] | None
    """Maps row coefficients [B] to the weighted sum of gradients; None if that would keep too much memory."""
    sums_K: torch.Tensor | None = None
    """Replaces `weighted`: the weighted sums for each row of a basis [K, B] of the coefficients."""

    def over(self, basis_KB: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum for each row of coefficients, [K, ...]."""
        if self.weighted is None:
            assert self.sums_K is not None
            return self.sums_K
        return torch.stack([self.weighted(coefficient_B) for coefficient_B in basis_KB])


def product_term(parameter: nn.Parameter, left_BTI: torch.Tensor, right_BTJ: torch.Tensor) -> Term:
    """Return the term of gradients that are products over T, [B, I, J], in the parameter's layout."""
    right_BTJ = right_BTJ.to(left_BTI.dtype)
    T, I_, J = *left_BTI.shape[1:], right_BTJ.shape[-1]
    if T * T * (I_ + J) <= (T + PASS_COST) * I_ * J:
        left_BTT, right_BTT = (at_least_float32(torch.bmm(x, x.mT)) for x in (left_BTI, right_BTJ))
        square_B = (left_BTT * right_BTT).flatten(1).sum(1)
    else:
        rows = max(1, AT_ONCE // (I_ * J))
        pairs = zip(left_BTI.split(rows), right_BTJ.split(rows), strict=True)
        norms = [
            torch.linalg.vector_norm(at_least_float32(torch.bmm(left.mT, right)), dim=(1, 2)) for left, right in pairs
        ]
        square_B = torch.cat(norms).square()
    return Term(parameter, square_B, partial(_weighted_product, left_BTI, right_BTJ))


def _weighted_product(left_BTI: torch.Tensor, right_BTJ: torch.Tensor, coefficient_B: torch.Tensor) -> torch.Tensor:
    a_B11, left, right = coefficient_B.to(left_BTI.dtype)[:, None, None], left_BTI, right_BTJ
    left, right = (a_B11 * left, right) if left.shape[-1] < right.shape[-1] else (left, a_B11 * right)
    return at_least_float32(left.flatten(0, 1).t() @ right.flatten(0, 1))


def add_times(sums_K: torch.Tensor, gradient: torch.Tensor, factors: list[float]) -> None:
    """Add a gradient to each of K sums, times its factor."""
    for total, factor in zip(sums_K, factors, strict=True):
        total.add_(gradient, alpha=factor)


def padded(values_N: torch.Tensor, number_N: torch.Tensor) -> torch.Tensor:
    """Return the values [N, ...] of each number, [R, most of one number, ...], with zeros at the end.

    `number_N`: int64, ascending from 0 to R - 1.
    """
    count_R = number_N.bincount()
    place_N = torch.arange(len(number_N), device=number_N.device) - (count_R.cumsum(0) - count_R)[number_N]
    padded = values_N.new_zeros(len(count_R), int(count_R.max()), *values_N.shape[1:])
    padded[number_N, place_N] = values_N
    return padded


def joined(values_BT: torch.Tensor, rollout_B: torch.Tensor | None) -> torch.Tensor:
    """Return the rows [B, T, ...] of each rollout one after another, [R, S * T, ...]; zeros where there are under S."""
    return values_BT if rollout_B is None else padded(values_BT, rollout_B).flatten(1, 2)


def direct_term(parameter: nn.Parameter, gradient_BX: torch.Tensor) -> Term:
    """Return the term of gradients small enough to keep, [B, *parameter.shape]."""
    gradient_BX = at_least_float32(gradient_BX)

    def weighted(coefficient_B: torch.Tensor) -> torch.Tensor:
        return torch.tensordot(coefficient_B.to(gradient_BX.dtype), gradient_BX, 1)

    return Term(parameter, gradient_BX.flatten(1).square().sum(1), weighted)


def embedding_term(parameter: Any, ids_BT: torch.Tensor, y_BTH: torch.Tensor) -> Term:
    """Return the term of an embedding; gradients are summed where an id repeats within a sequence."""
    B, (V, H) = len(ids_BT), parameter.shape
    keys = torch.arange(B, device=ids_BT.device)[:, None] * V + ids_BT
    unique_U, inverse = keys.unique(return_inverse=True)
    gradient_UH = y_BTH.new_zeros(len(unique_U), H, dtype=at_least_float32(y_BTH[:0]).dtype)
    gradient_UH.index_add_(0, inverse.flatten(), y_BTH.flatten(0, 1).to(gradient_UH.dtype))
    row_U, id_U = unique_U // V, unique_U % V

    def weighted(coefficient_B: torch.Tensor) -> torch.Tensor:
        scaled = gradient_UH * coefficient_B.to(gradient_UH.dtype)[row_U, None]
        return gradient_UH.new_zeros(V, H).index_add_(0, id_U, scaled)

    square_B = gradient_UH.new_zeros(B).index_add_(0, row_U, gradient_UH.square().sum(1))
    return Term(parameter, square_B, weighted)


class UnsupportedModelError(Exception):
    """The model has trainable parameters that need a separate backward pass per row."""


class RowHooks:
    """Terms of the trainable parameters of `body`, one micro-batch at a time.

    Parameters are identified by their objects between passes, which may differ from those that a pass uses.
    """

    def __init__(self, body: nn.Module) -> None:
        """Raises UnsupportedModelError. The forward pass of `body` must take `input_ids`."""
        self.body = body
        self._trained: dict[nn.Module, dict[str, nn.Parameter]] = {}
        """Trainable parameters that each module owns directly, by name."""
        self._hooked: list[nn.Module] = []
        self._scales: list[nn.Module] = []
        """Norms of classes other than LayerNorm."""
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
        self._used: set[nn.Module] = set()
        self._leaves: dict[nn.Parameter, torch.Tensor] = {}
        """Scales of norms, one for each row."""
        self._embedded: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rollout_B: torch.Tensor | None = None

    @contextmanager
    def watching(self, rows: int, rollout_B: torch.Tensor | None = None) -> Iterator[list[Term]]:
        """Disable gradients of `body`'s parameters; yield the list that its backward pass fills with terms.

        With the rollouts of rows, terms are of rollouts.
        """
        self._rollout_B = rollout_B
        terms: list[Term] = []
        trained = {p for own in self._trained.values() for p in own.values()}
        handles: list[Any] = []
        try:
            for p in trained:
                p.requires_grad_(False)
            for module in self._hooked:
                handles.append(module.register_forward_hook(partial(self._look, rows, terms)))
            for module in self._scales:
                one = _Scales(self._leaves, rows, self._trained[module])
                handles.append(module.register_forward_pre_hook(one.put))
                handles.append(module.register_forward_hook(one.take, always_call=True))
            yield terms
        finally:
            for p in trained:
                p.requires_grad_(True)
            for handle in handles:
                handle.remove()
            for kept in (self._used, self._leaves, self._embedded):
                kept.clear()

    def _look(
        self, rows: int, terms: list[Term], module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        if module in self._used:
            raise UnsupportedModelError(f"a {type(module).__name__} is used more than once")
        self._used.add(module)
        x = args[0].detach()
        if len(output) != rows:  # positions, shared by all rows
            output, x = output.expand(rows, *output.shape[1:]), x.expand(rows, *x.shape[1:])
        if not output.requires_grad:
            output.requires_grad_()

        def keep(gradient: torch.Tensor) -> None:
            terms.extend(self._terms(module, x, gradient))

        output.register_hook(keep)
        return output

    def of_scales(self) -> list[Term]:
        """Return the terms that need no hooks, after the backward pass."""
        leaves = [(p, leaf.grad) for p, leaf in self._leaves.items() if leaf.grad is not None]
        of_rows = [(p, gradient.reshape(len(gradient), *p.shape)) for p, gradient in leaves]
        return [direct_term(p, sum_by_rollout(at_least_float32(gradient), self._rollout_B)) for p, gradient in of_rows]

    def embedded(self, parameter: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ids [B, T] and gradients [B, T, H] of the embedding with this weight, after the backward pass."""
        return self._embedded.get(parameter)

    def _terms(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Iterator[Term]:
        x, y = joined(x, self._rollout_B), joined(y, self._rollout_B)
        trained = self._trained[module]
        weight, bias = trained.get("weight"), trained.get("bias")
        if isinstance(module, nn.Embedding):
            if module.padding_idx is not None:  # the padding id gets no gradient
                y = y.masked_fill((x == module.padding_idx)[..., None], 0)
            assert weight is not None
            self._embedded[weight] = x, y
            yield embedding_term(weight, x, y)
        elif isinstance(module, nn.LayerNorm) and weight is not None:
            normal = nn.functional.layer_norm(x, module.normalized_shape, eps=module.eps)
            yield direct_term(weight, (y * normal).sum(1))
        elif weight is not None:
            yield product_term(weight, *((x.to(y.dtype), y) if isinstance(module, Conv1D) else (y, x)))
        if bias is not None:
            yield direct_term(bias, at_least_float32(y).sum(1))


class _Scales:
    """Gives a norm separate scales for each row during its forward pass."""

    def __init__(self, leaves: dict[nn.Parameter, torch.Tensor], rows: int, trained: dict[str, nn.Parameter]) -> None:
        self._leaves, self._rows, self._trained = leaves, rows, trained
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
