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
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..batch import SharedPrompts
from .logprob import at_least_float32
from .row_sums import Rows, RowSums, Weighted
from .row_uses import OfPrompts, Uses

PASS_COST = 50.0
"""Measured on a CPU: multiply-adds of a Gram matrix in whose time one number of a product is squared and added up (30
to 80; most where a sum does not fit into the cache)."""
AT_ONCE = 1 << 19
"""Numbers of products made at once, so that they are still in the cache when they are added up."""


def product_term(
    parameter: nn.Parameter,
    left_BTI: torch.Tensor,
    right_BTJ: torch.Tensor,
    rows: Rows,
    sums: RowSums,
    *,
    hold: bool = True,
    weighted: Weighted | None = None,
) -> torch.Tensor:
    """Squared norms [B] of the products over T, [B, I, J] as `parameter` is; their weighted sum goes to `sums`.

    `hold`: whether both factors may be kept until then. `weighted`: a cheaper way to that sum.
    """
    right_BTJ = right_BTJ.to(left_BTI.dtype)
    B, T, I_, J = *left_BTI.shape, right_BTJ.shape[-1]
    few_tokens = T * T * (I_ + J) <= PASS_COST * I_ * J
    if not hold or (not few_tokens and sums.slots * I_ * J <= B * T * (I_ + J)):
        return _made_products(parameter, left_BTI, right_BTJ, rows, sums)

    sums.add_later(parameter, weighted or partial(_weighted_product, left_BTI, right_BTJ, rows), rows)
    if T * (I_ + J) > I_ * J:
        return _made_products(parameter, left_BTI, right_BTJ, rows, None)
    return (at_least_float32(torch.bmm(left_BTI, left_BTI.mT)) * sums.pairs(right_BTJ)).flatten(1).sum(1)


def _weighted_product(
    left_BTI: torch.Tensor, right_BTJ: torch.Tensor, rows: Rows, coefficient_B: torch.Tensor
) -> torch.Tensor:
    """Weighted sum over rows of the products over T."""
    a_B11, left, right = rows.of(coefficient_B, left_BTI)[:, None, None], left_BTI, right_BTJ
    if not a_B11.all():
        there = a_B11[:, 0, 0] != 0
        a_B11, left, right = a_B11[there], left[there], right[there]
    left, right = (a_B11 * left, right) if left.shape[-1] < right.shape[-1] else (left, a_B11 * right)
    return at_least_float32(left.flatten(0, 1).t() @ right.flatten(0, 1))


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


class UnsupportedModelError(Exception):
    """The model has trainable parameters that only a backward pass for each row can tell apart."""


class RowHooks:
    """Norms and sums of the gradients of the trainable parameters of `body`, one micro-batch at a time.

    Parameters are known by what they are between passes, which need not be what a pass computes with.
    """

    def __init__(self, body: nn.Module) -> None:
        """Raises UnsupportedModelError. The forward pass of `body` must take `input_ids`."""
        self.body = body
        self._prompts: SharedPrompts | None = None
        """Prompts that a forward pass under way is over."""
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
        self._prompt_leaves: dict[nn.Parameter, torch.Tensor] = {}
        """Scales as in `_leaves`, one for each prompt."""
        self._of_prompts: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients at prompts of scales, for each row."""

    @property
    def can_share(self) -> bool:
        """Whether it knows how to tell the gradients of rows apart that share a prompt."""
        return all(type(module) in (nn.Linear, nn.Embedding) for module in self._hooked)

    @contextmanager
    def over_prompts(self, prompts: SharedPrompts) -> Iterator[None]:
        """Inside, forward passes are over these prompts; a backward pass through them is due for each of their rows."""
        self._prompts = prompts
        try:
            yield
        finally:
            self._prompts = None

    def passed(self, rows: torch.Tensor, prompt_B: torch.Tensor) -> None:
        """A backward pass through the prompts of these rows, one of each at most, is over."""
        for uses in self._uses.values():
            if uses.of_prompts is not None:
                uses.of_prompts.take(rows)
        for p, leaf in self._prompt_leaves.items():
            if leaf.grad is not None:
                whole = self._of_prompts.setdefault(p, leaf.grad.new_zeros(len(prompt_B), *p.shape))
                whole[rows] = leaf.grad.reshape(-1, *p.shape)[prompt_B[rows]]
                leaf.grad = None

    def of_shared(self, rows: Rows, sums: RowSums) -> list[torch.Tensor]:
        """The squared norms that had to wait for passes through prompts."""
        modules = [module for module, uses in self._uses.items() if uses.of_prompts is not None]
        return [self._terms(module, self._uses[module], rows, sums) for module in modules]

    @contextmanager
    def watching(self, rows: Rows, sums: RowSums) -> Iterator[list[torch.Tensor]]:
        """Inside, no parameter of `body` gets a gradient; the squared norms [B] that its backward pass will leave."""
        squares: list[torch.Tensor] = []
        trained = {p for own in self._trained.values() for p in own.values()}
        self._uses = {module: Uses() for module in self._hooked}
        handles: list[Any] = []
        try:
            for p in trained:
                p.requires_grad_(False)
            for module in self._hooked:
                handles.append(module.register_forward_hook(partial(self._look, rows, sums, squares)))
            for module in self._scales:
                one = _Scales(partial(self._leaves_now, len(rows)), self._trained[module])
                handles.append(module.register_forward_pre_hook(one.put))
                handles.append(module.register_forward_hook(one.take, always_call=True))
            yield squares
        finally:
            for p in trained:
                p.requires_grad_(True)
            for handle in handles:
                handle.remove()
            self._uses, self._leaves, self._prompt_leaves, self._of_prompts = {}, {}, {}, {}

    def _leaves_now(self, rows: int) -> tuple[dict[nn.Parameter, torch.Tensor], int]:
        """Scales of what passes, and how many of each it takes."""
        if self._prompts is None:
            return self._leaves, rows
        return self._prompt_leaves, len(self._prompts.first_U)

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
        if self._prompts is not None:
            return self._look_at_prompts(self._prompts, uses, x, output)
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

    def _look_at_prompts(
        self, prompts: SharedPrompts, uses: Uses, x: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        if uses.of_prompts is not None:
            raise UnsupportedModelError("a module is used more than once for a prompt")
        if not output.requires_grad:
            output.requires_grad_()
        B = len(prompts.prompt_B)
        found = uses.of_prompts = OfPrompts(x, prompts.prompt_B, output.new_zeros(B, *output.shape[1:]).detach())

        def keep(gradient: torch.Tensor) -> None:
            found.arrived_U = gradient

        output.register_hook(keep)
        return output

    def of_scales(self, rows: Rows, sums: RowSums) -> list[torch.Tensor]:
        """The squared norms that come without hooks, after the backward pass."""
        found = []
        for p in {**self._leaves, **self._prompt_leaves}:
            parts = [self._of_prompts[p]] if p in self._of_prompts else []
            if p in self._leaves and (gradient := self._leaves[p].grad) is not None:
                parts.append(gradient.reshape(len(rows), *p.shape))
            if parts:
                found.append(direct_term(p, torch.stack(parts).sum(0), rows, sums))
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
            square_B = square_B + product_term(weight, left, right, rows, sums, weighted=_apart(uses, rows))
        if bias is not None:
            square_B = square_B + direct_term(bias, at_least_float32(y).sum(1), rows, sums)
        return square_B


class _Scales:
    """Puts scales of its own for each row into a norm while that computes."""

    def __init__(
        self,
        leaves: Callable[[], tuple[dict[nn.Parameter, torch.Tensor], int]],
        trained: dict[str, nn.Parameter],
    ) -> None:
        self._leaves, self._trained = leaves, trained
        self._usual: dict[str, nn.Parameter | None] = {}

    def put(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._usual = {name: module._parameters[name] for name in self._trained}
        leaves, rows = self._leaves()
        for name, p in self._trained.items():
            if p not in leaves:
                whole = getattr(module, name).detach()
                shape = rows, *(1,) * (args[0].ndim - 2), len(whole)
                leaves[p] = whole.expand(shape).clone().requires_grad_()
            module._parameters[name] = leaves[p]  # type: ignore[assignment]

    def take(self, module: nn.Module, *_: object) -> None:
        module._parameters.update(self._usual)


def _apart(uses: Uses, rows: Rows) -> Weighted | None:
    """The weighted sum over rows of a linear layer's gradients, where prompts and completions are best summed apart."""
    prompts = uses.of_prompts
    if prompts is None:
        return None
    parts: list[Weighted] = [partial(prompts.weighted, rows)]
    if uses.inputs:
        parts.append(partial(_weighted_product, uses.gradients[0], uses.inputs[0].to(uses.gradients[0].dtype), rows))
    return lambda coefficient_B: torch.stack([part(coefficient_B) for part in parts]).sum(0)


def _ids_and_gradient(module: nn.Embedding, uses: Uses) -> tuple[torch.Tensor, torch.Tensor]:
    ids_BT, y_BTH = uses.joined()
    if module.padding_idx is not None:  # which an embedding never learns
        y_BTH = y_BTH.masked_fill((ids_BT == module.padding_idx)[..., None], 0)
    return ids_BT, y_BTH
