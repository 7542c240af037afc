"""Decode steps of the Llama family by Triton kernels: 9 launches a layer. For half precision on a GPU.

The same numbers as `llama` up to rounding: sums are in float32 (a total of the vocabulary in float64) and results are
rounded where PyTorch rounds them. Triton's interpreter (TRITON_INTERPRET=1) runs the kernels on a CPU.

A kernel takes several tensors or sizes as a tuple. Heads are rotated in pairs of neighbours, as `llama` stores them.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from ...base.errors import ConfigError
from .. import sampling
from .backend import Output
from .cache import Chunk, KVCache
from .llama import LlamaBackend

Tensor = torch.Tensor
COLUMNS = 64
"""Columns of the cache that a program of attention reads at a time."""
LEAST_QUERIES = 16
"""Tensor cores multiply at least so many rows; the queries of a group of heads are padded to them."""
BLOCK, PIECE = tl.constexpr(sampling.BLOCK), tl.constexpr(sampling.PIECE)
BELOW_ONE = tl.constexpr(1 - 2.0**-53)
"""A float64 times this is the next smaller one."""


def require(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError where the kernels cannot run."""
    if dtype == torch.float32:
        raise ConfigError("engine: fused_kernels: needs half precision, not float32; set dtype: bfloat16")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"engine: fused_kernels: needs a CUDA device, not {device}; leave it out")


def sample(logits_NV: Tensor, uniform_N: Tensor, transform: sampling.Transform) -> tuple[Tensor, Tensor]:
    """`sampling.sample` in one kernel that reads the logits three times; with filters or greedy rows the plain one."""
    if transform[1:] != (None,) * 4:
        return sampling.sample(logits_NV, uniform_N, transform)
    n, vocabulary = logits_NV.shape
    tokens_N = torch.empty(n, dtype=torch.int64, device=logits_NV.device)
    logp_N = torch.empty(n, dtype=torch.float32, device=logits_NV.device)
    blocks = triton.cdiv(vocabulary, sampling.BLOCK)
    given = logits_NV.contiguous(), transform.inverse_temperature_N, uniform_N
    with _current(logits_NV.device):
        _draw[(n,)](*given, tokens_N, logp_N, vocabulary, blocks, _power(blocks), num_warps=8)
    return tokens_N, logp_N


class FusedLlamaBackend(LlamaBackend):
    """`LlamaBackend` with kernels of its own for decode steps; prefills are the same."""

    sample = staticmethod(sample)

    def decode(self, tokens_N: Tensor, positions_N: Tensor, cache: KVCache, chunks: list[Chunk]) -> Output:
        with _current(self.device):
            hidden_NH = self._decoded(tokens_N, positions_N, cache, chunks)
        return Output(hidden_NH, self._head(hidden_NH))

    def _decode(self, tokens_N: Tensor, positions_N: Tensor, cache: KVCache, chunks: list[Chunk]) -> Tensor:
        """Return inputs of the lm_head. `cache.mask` stays as it is: the kernels read up to a row's position."""
        x_NH, added_NH = self._embedding[tokens_N], None
        rotation = torch.view_as_real(self._rotation)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            qkv = layer.qkv(self._add_and_norm(x_NH, added_NH, layer.before))
            q = self._rotate_and_store(qkv, layer.qk_norm, rotation, positions_N, (keys, values))
            attended = self._attended(q, (keys, values), positions_N, cache.prompts)
            gate_up = layer.gate_up(self._add_and_norm(x_NH, layer.out(attended), layer.after))
            added_NH = layer.down(_gated(gate_up))
        return self._add_and_norm(x_NH, added_NH, self._norm)

    def _add_and_norm(self, x_NH: Tensor, added_NH: Tensor | None, weight_H: Tensor | None) -> Tensor:
        """Add to the hidden states in place; return what a product takes of them."""
        n, width = x_NH.shape
        normed = torch.empty(n, width, dtype=self.dtype, device=x_NH.device)
        given = x_NH if added_NH is None else added_NH
        _norm[(n,)](x_NH, given, weight_H, normed, self._eps, added_NH is not None, width, _power(width))
        return normed

    def _rotate_and_store(
        self, qkv: Tensor, qk_norm: Tensor | None, rotation: Tensor, positions_N: Tensor, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return queries [N, heads * D]; keys and values go to the cache."""
        n, size = len(qkv), self._size
        queries = torch.empty(n, self._heads * size, dtype=self.dtype, device=qkv.device)
        normed = qk_norm is not None
        sizes = self._heads, self._kv_heads, size, _power(size // 2), self._eps, normed
        norm = qk_norm if normed else rotation
        grid = n, self._heads + 2 * self._kv_heads
        _rotate[grid](qkv, norm, rotation, positions_N, queries, cache, cache[0].shape[2], sizes)
        return queries

    def _attended(self, q: Tensor, cache: tuple[Tensor, Tensor], positions_N: Tensor, prompts_2R: Tensor) -> Tensor:
        n, groups = len(q), self._heads // self._kv_heads
        attended = torch.empty_like(q)
        width, queries = max(_power(self._size), LEAST_QUERIES), max(_power(groups), LEAST_QUERIES)
        sizes = groups, self._kv_heads, self._size, width, queries, COLUMNS, self._scale
        of_prompt = prompts_2R[0], prompts_2R[1]
        _attend[n, self._kv_heads](q, cache, positions_N, of_prompt, attended, cache[0].shape[2], sizes, num_stages=2)
        return attended


def _gated(gate_up_N2F: Tensor) -> Tensor:
    """silu(gate) * up."""
    n, width = len(gate_up_N2F), gate_up_N2F.shape[1] // 2
    gated = torch.empty(n, width, dtype=gate_up_N2F.dtype, device=gate_up_N2F.device)
    _gate[n, triton.cdiv(width, 1024)](gate_up_N2F, gated, width, 1024)
    return gated


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one, where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power(n: int) -> int:
    return int(triton.next_power_of_2(n))


@triton.jit
def _norm(x, added, weight, normed, eps, ADD: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore
    row, h = tl.program_id(0), tl.arange(0, WIDTH)
    kept = h < H
    value = tl.load(x + row * H + h, kept, 0.0)
    if ADD:
        value += tl.load(added + row * H + h, kept, 0.0).to(tl.float32)
        tl.store(x + row * H + h, value, kept)
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    value = value * scale * tl.load(weight + h, kept, 0.0)
    tl.store(normed + row * H + h, value.to(normed.dtype.element_ty), kept)


# A graph has other positions than the step before its capture: compile nothing for their alignment.
@triton.jit(do_not_specialize=["positions"])
def _rotate(qkv, norm, rotation, positions, queries, cache, columns, sizes: tl.constexpr):  # type: ignore
    """A program has one head of one row; the heads are those of queries, keys and values, in this order."""
    HEADS: tl.constexpr = sizes[0]
    KV_HEADS: tl.constexpr = sizes[1]
    D: tl.constexpr = sizes[2]
    keys, values = cache
    row, head, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, sizes[3])
    kept = j < D // 2
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D + 2 * j
    even, odd = tl.load(source, kept, 0.0).to(tl.float32), tl.load(source + 1, kept, 0.0).to(tl.float32)
    position = tl.load(positions + row)
    if head < HEADS + KV_HEADS:
        if sizes[5]:
            scale = tl.rsqrt(tl.sum(even * even + odd * odd) / D + sizes[4])
            even = even * scale * tl.load(norm + head * D + 2 * j, kept, 0.0)
            odd = odd * scale * tl.load(norm + head * D + 2 * j + 1, kept, 0.0)
        cos = tl.load(rotation + position * D + 2 * j, kept, 0.0)
        sin = tl.load(rotation + position * D + 2 * j + 1, kept, 0.0)
        even, odd = even * cos - odd * sin, even * sin + odd * cos
    if head < HEADS:
        target = queries + (row * HEADS + head) * D
    elif head < HEADS + KV_HEADS:
        target = keys + ((row * KV_HEADS + head - HEADS) * columns + position) * D
    else:
        target = values + ((row * KV_HEADS + head - HEADS - KV_HEADS) * columns + position) * D
    tl.store(target + 2 * j, even.to(queries.dtype.element_ty), kept)
    tl.store(target + 2 * j + 1, odd.to(queries.dtype.element_ty), kept)


@triton.jit(do_not_specialize=["positions"])
def _attend(queries, cache, positions, prompts, attended, columns, sizes: tl.constexpr):  # type: ignore
    """A program has the queries of one row that read one head of keys and values.

    Columns of a prompt are read from the first row that has it. Programs of siblings run at a time, so that memory is
    read once for all of them and the card's cache for the others.
    """
    GROUPS: tl.constexpr = sizes[0]
    D: tl.constexpr = sizes[2]
    keys, values = cache
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, g = tl.arange(0, sizes[3]), tl.arange(0, sizes[4])
    position = tl.load(positions + row).to(tl.int32)
    first, shared = tl.load(prompts[0] + row), tl.load(prompts[1] + row)
    queried = ((row * sizes[1] + head) * GROUPS + g[:, None]) * D + d[None, :]
    real = (g < GROUPS)[:, None] & (d < D)[None, :]
    q = tl.load(queries + queried, real, 0.0)
    highest = tl.full([sizes[4]], -float("inf"), tl.float32)
    total = tl.zeros([sizes[4]], tl.float32)
    sums = tl.zeros([sizes[4], sizes[3]], tl.float32)
    for start in range(0, position + 1, sizes[5]):
        c = start + tl.arange(0, sizes[5])
        filled = c <= position
        of_C = tl.where(c < shared, first, row)
        column = (of_C * sizes[1] + head) * columns + c
        there = filled[:, None] & (d < D)[None, :]
        k = tl.load(keys + column[:, None] * D + d[None, :], there, 0.0)
        v = tl.load(values + column[:, None] * D + d[None, :], there, 0.0)
        scores = tl.where(filled[None, :], tl.dot(q, tl.trans(k)) * sizes[6], -float("inf"))
        before, highest = highest, tl.maximum(highest, tl.max(scores, 1))
        weight, fade = tl.exp(scores - highest[:, None]), tl.exp(before - highest)
        sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v)
        total = total * fade + tl.sum(weight, 1)
    tl.store(attended + queried, (sums / total[:, None]).to(attended.dtype.element_ty), real)


@triton.jit
def _gate(gate_up, gated, F: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore
    row, f = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    gate = tl.load(gate_up + row * 2 * F + f, f < F, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, f < F, 0.0)
    silu = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(gated + row * F + f, (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype), f < F)


@triton.jit
def _scaled(logits, v, V: tl.constexpr, inverse):  # type: ignore
    return tl.load(logits + v, v < V, -float("inf")).to(tl.float32) * inverse


@triton.jit
def _draw(  # type: ignore
    logits, inverse_temperature, uniform, tokens, logp, V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr
):
    """A program has one row: its maximum, sums of blocks, and the token in the block that the number falls into."""
    row, inside, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inverse, given = tl.load(inverse_temperature + row), logits + row * V
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for i in range(BLOCKS):
        highest = tl.maximum(highest, _scaled(given, i * BLOCK + inside, V, inverse))
    top = tl.max(highest)
    sums = tl.zeros([WIDTH], tl.float64)
    for i in range(BLOCKS):
        weights = tl.exp(_scaled(given, i * BLOCK + inside, V, inverse) - top)
        pieces = tl.sum(tl.reshape(weights, [BLOCK // PIECE, PIECE]), 1)
        sums = tl.where(blocks == i, tl.sum(pieces.to(tl.float64)), sums)
    total = tl.sum(sums)
    target = tl.minimum(total * tl.load(uniform + row).to(tl.float64), total * BELOW_ONE)
    block, before = _passed(sums, target, blocks)
    weights = tl.exp(_scaled(given, block * BLOCK + inside, V, inverse) - top)
    index, _ = _passed(weights.to(tl.float64), target - before, inside)
    weight = tl.sum(tl.where(inside == index, weights, 0.0)).to(tl.float64)
    tl.store(tokens + row, (block * BLOCK + index).to(tl.int64))
    tl.store(logp + row, tl.log(weight / total).to(tl.float32))


@triton.jit
def _passed(sums, target, number):  # type: ignore
    """Return the first index whose running sum is above the target, never one of weight 0, and the sum before it."""
    running = tl.cumsum(sums, 0)
    target = tl.minimum(tl.maximum(target, 0.0), tl.max(running) * BELOW_ONE)
    index = tl.sum((running <= target).to(tl.int32))
    return index, tl.sum(tl.where(number == index, running - sums, 0.0))
