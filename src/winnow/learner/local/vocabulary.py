"""Log-probabilities over a large vocabulary, one slice at a time: full logits are never held.

The backward pass recomputes each slice's logits, which costs a third more products with the head. A slice's gradient is
written once, and all other intermediate values fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

SLICE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits held at once, by device. On a CPU (16 MiB in float32) larger slices overflow the cache and smaller ones make
narrow products, measured; on a GPU (256 MiB) each slice costs launches."""


def sliced_logp(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    *,
    squares: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `of_tokens` of `hidden @ weight.T` without filters: log-probability (nats), entropy, sum of squares [N].

    `hidden_NH` and `weight_VH` have the compute dtype; results are float32, or float64 for float64 input.
    """
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Sliced.apply(
        hidden_NH, weight_VH, targets_N, temperature, squares
    )
    return found


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        squares: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        largest = torch.full(targets_N.shape, -torch.inf, dtype=wide, device=hidden_NH.device)
        # Sums of e = exp(logit - largest), of e times (logit - largest), and of e squared.
        total, moment, square = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(largest)
        target = torch.zeros_like(largest)
        for start, logits in _slices(hidden_NH, weight_VH, temperature, wide):
            here = (targets_N - start).clamp(0, logits.shape[1] - 1)
            inside = (targets_N >= start) & (targets_N < start + logits.shape[1])
            target = torch.where(inside, logits.gather(1, here[:, None])[:, 0], target)
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            lower = torch.where(before == -torch.inf, 0, before - largest)
            shrink = torch.where(before == -torch.inf, 0, lower.exp())
            logits -= largest[:, None]
            e = logits.exp()
            moment = shrink * (moment + lower * total) + torch.linalg.vecdot(e, logits)
            total = shrink * total + e.sum(1)
            if squares:
                square = shrink.square() * square + torch.linalg.vecdot(e, e)
        log_total = total.log()
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, largest + log_total, log_total - moment / total)
        ctx.temperature, ctx.wide = temperature, wide
        ctx.set_materialize_grads(False)
        squared = square / total.square()
        ctx.mark_non_differentiable(squared)
        return target - largest - log_total, log_total - moment / total, squared

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, norm_N, entropy_N = ctx.saved_tensors
        to_logp, to_entropy, _ = gradients
        if to_logp is None:
            to_logp = torch.zeros_like(norm_N)
        to_hidden = torch.zeros_like(hidden_NH, dtype=ctx.wide) if ctx.needs_input_grad[0] else None
        to_weight = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        for start, logits in _slices(hidden_NH, weight_VH, ctx.temperature, ctx.wide):
            logits -= norm_N[:, None]
            if to_entropy is None:
                y = logits.exp_().mul_(-to_logp[:, None])
            else:
                factor = to_logp[:, None] + to_entropy[:, None] * (logits + entropy_N[:, None])
                y = logits.exp_().mul_(-factor)
            inside = (targets_N >= start) & (targets_N < start + y.shape[1])
            here = (targets_N - start).clamp(0, y.shape[1] - 1)
            y.scatter_add_(
                1, here[:, None], torch.where(inside, to_logp, 0)[:, None]
            )  # no boolean mask, which would make the host wait
            if ctx.temperature != 1:
                y /= ctx.temperature
            y = y.to(hidden_NH.dtype)
            some = slice(start, start + y.shape[1])
            if to_weight is not None:
                torch.mm(y.t(), hidden_NH, out=to_weight[some])
            if to_hidden is not None:
                to_hidden += y @ weight_VH[some]
        return None if to_hidden is None else to_hidden.to(hidden_NH.dtype), to_weight, None, None, None


def _slices(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, temperature: float, wide: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each slice's first id and logits."""
    elements = SLICE_ELEMENTS.get(hidden_NH.device.type, SLICE_ELEMENTS["cpu"])
    size = max(1, elements // max(1, len(hidden_NH)))
    for start in range(0, len(weight_VH), size):
        logits = (hidden_NH @ weight_VH[start : start + size].t()).to(wide)
        yield start, logits if temperature == 1 else logits.div_(temperature)
