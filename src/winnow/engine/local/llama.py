"""Forward pass of the Llama family over its Hugging Face weights, with fewer and larger operations.

At load, Q, K and V become one matrix and so do gate and up; the columns of a rotary head are interleaved, so that the
rotation is one complex product. In float32 norm weights and the attention scale are folded into the matrices behind
them. In half precision they are not: matrices are rounded as a learner rounds them under autocast, and hidden states
between products stay float32 as there, or engine and learner would be different policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from ..sampling import sample
from .backend import Drafted, Kept, Output, Prefilled, continued
from .cache import Chunk, KVCache
from .graphs import DecodeGraphs

CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
PREFIX = "model.layers.{}."
TYPICAL_ROWS = 128
"""Matrices get the layout that is fastest for so many rows; any number can be multiplied."""
PACKED_FROM = 1 << 18
"""Elements from which a float32 matrix is packed: a call of oneDNN costs about 30 microseconds and one of MKL 4, which
has to copy the matrix in every product. Measured on a CPU."""
LEAST_ROWS = 4
"""MKL multiplies fewer rows by a kernel that rounds in another way."""


class Linear:
    """x @ weight.t() + bias for a weight [out, in]; large ones on a CPU are packed once by oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        pack = torch.ops.mkldnn._reorder_linear_weight
        if self._packed:
            self._weight = pack(weight, TYPICAL_ROWS)
        else:  # a GPU multiplies by a transposed matrix as fast; a copy would take memory
            self._weight = weight.t() if weight.is_cuda else weight.t().contiguous()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self._bias, "none", [], "")
            return product
        n = x_NI.shape[0]  # `len` of a tensor takes ten times as long
        if n < LEAST_ROWS and not x_NI.is_cuda:
            return self(F.pad(x_NI, (0, 0, 0, LEAST_ROWS - n)))[:n]
        return x_NI @ self._weight if self._bias is None else torch.addmm(self._bias, x_NI, self._weight)

    def add_to(self, sum_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """Add x @ weight.t() to `sum_NO` in place; for a matrix without bias."""
        if self._packed or sum_NO.dtype != x_NI.dtype or x_NI.shape[0] < LEAST_ROWS:
            sum_NO.add_(self(x_NI))
        else:
            sum_NO.addmm_(x_NI, self._weight)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return (weight.dtype == torch.float32 and weight.numel() >= PACKED_FROM) or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Layer(NamedTuple):
    """Weights of a layer."""

    before: torch.Tensor | None
    """[H], of the norm before attention; None where it is folded in."""
    qkv: Linear
    qk_norm: torch.Tensor | None
    """[heads + kv heads, D]; that of queries has the attention scale where it is folded in."""
    out: Linear
    after: torch.Tensor | None
    gate_up: Linear
    down: Linear


def unlike_llama(model: Any) -> str:
    """Return why `LlamaBackend` does not compute what this model computes; empty: it does."""
    config, name = model.config, type(model).__name__
    if name not in CLASSES:
        return f"{name} is not of the Llama family"
    rope = config.rope_parameters
    if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
        return f"{name} has rope_type {kind}"
    if (share := rope.get("partial_rotary_factor", 1)) != 1:
        return f"{name} has partial_rotary_factor {share}"
    if config.hidden_act != "silu":
        return f"{name} has hidden_act {config.hidden_act}"
    others = sorted(set(model.state_dict()) - _names(config))
    return f"{name} has {others[0]}" if others else ""


def _names(config: Any) -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{p}_proj.weight" for p in "qkvo"] + [f"self_attn.{p}_proj.bias" for p in "qkv"]
    parts += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")] + [f"self_attn.{p}_norm.weight" for p in "qk"]
    return names | {PREFIX.format(i) + part for i in range(config.num_hidden_layers) for part in parts}


class LlamaBackend:
    mixed_lengths = True
    """Whether one prefill takes prompts of different lengths."""
    sample = staticmethod(sample)

    def __init__(
        self, model: Any, *, vocab_size: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = model.config
        self.device, self.dtype, self.vocab_size = device, dtype, vocab_size
        self._folded = dtype == torch.float32
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._scale = 1.0 if self._folded else self._size**-0.5
        """Factor of attention scores; 1 where the queries have it."""
        self._eps = config.rms_norm_eps
        self._n_layers = config.num_hidden_layers
        self.kv_shapes = [((self._kv_heads, self._size),) * 2] * self._n_layers
        """Per layer, (heads, head size) of the keys and of the values."""
        self._rotary, self._rotary_device = model.model.rotary_emb, model.model.embed_tokens.weight.device
        self._rotation = self._rotations(max_length)
        self._graphs = DecodeGraphs(self._decode, device) if device.type == "cuda" else None
        self._decoded = self._graphs or self._decode
        self.load(model.state_dict())

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a checked state dict (see `Facts.check_state`) by copy."""
        source = state["model.embed_tokens.weight"]
        head = state.get("lm_head.weight", source)
        layers = [self._pack(state, PREFIX.format(i)) for i in range(self._n_layers)]
        self._embedding, self._head, self._layers = (
            self._copy(source),
            Linear(self._given(head[: self.vocab_size])),
            layers,
        )
        self._norm = self._copy(state["model.norm.weight"])

    def release(self) -> None:
        """Give up the memory of the weights until the next `load`."""
        if self._graphs:
            self._graphs.clear()
        del self._embedding, self._head, self._layers, self._norm

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, torch.float32, copy=True)

    def _given(self, matrix: torch.Tensor) -> torch.Tensor:
        """A copy only on a GPU: elsewhere `Linear` makes one."""
        return matrix.detach().to(self.device, self.dtype, copy=self.device.type != "cpu")

    def _pack(self, state: Mapping[str, torch.Tensor], prefix: str) -> Layer:
        def get(name: str) -> torch.Tensor:
            return state[prefix + name].detach().to(self.device, torch.float32)

        def scaled(matrix: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
            return matrix if columns is None else matrix * columns

        def pack(*matrices: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
            together = torch.cat(matrices).to(self.dtype) if len(matrices) > 1 else self._given(matrices[0])
            return Linear(together, bias)

        before, after = get("input_layernorm.weight").clone(), get("post_attention_layernorm.weight").clone()
        inward, up, scale = (before, after, self._size**-0.5) if self._folded else (None, None, 1)
        q, k, v = (scaled(get(f"self_attn.{p}_proj.weight"), inward) for p in "qkv")
        q, k = self._interleave(q), self._interleave(k)
        bias = qk_norm = None
        if prefix + "self_attn.q_norm.weight" in state:
            q_norm, k_norm = (self._interleave(get(f"self_attn.{p}_norm.weight")) for p in "qk")
            qk_norm = torch.stack([q_norm * scale] * self._heads + [k_norm] * self._kv_heads)
        else:
            q = q * scale
        if prefix + "self_attn.q_proj.bias" in state:
            q_bias, k_bias, v_bias = (get(f"self_attn.{p}_proj.bias") for p in "qkv")
            q_bias = self._interleave(q_bias) * (1 if qk_norm is not None else scale)
            bias = torch.cat([q_bias, self._interleave(k_bias), v_bias]).to(self.dtype)
        gate_up = pack(scaled(get("mlp.gate_proj.weight"), up), scaled(get("mlp.up_proj.weight"), up))
        out, down = pack(get("self_attn.o_proj.weight")), pack(get("mlp.down_proj.weight"))
        norms = (None, None) if self._folded else (before, after)
        return Layer(norms[0], pack(q, k, v, bias=bias), qk_norm, out, norms[1], gate_up, down)

    def _interleave(self, tensor: torch.Tensor) -> torch.Tensor:
        """[heads * D, ...] with the two halves of each head woven together: j, j + D/2, j + 1, ..."""
        heads = tensor.unflatten(0, (-1, 2, self._size // 2))
        return heads.transpose(1, 2).flatten(0, 2)

    def _rotations(self, length: int) -> torch.Tensor:
        """complex64 [length, 1, D/2] from the model's own rotary module."""
        positions = torch.arange(length, device=self._rotary_device)[None]
        cos, sin = self._rotary(torch.zeros(1, device=self._rotary_device), positions)
        half = self._size // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None].to(self.device)

    def _qkv(self, layer: Layer, x_NH: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries [N, heads, D], keys and values [N, kv heads, D], rotated."""
        product = layer.qkv(self._normed(x_NH, layer.before))
        qkv = product.view(x_NH.shape[0], -1, self._size)
        if self._folded and layer.qk_norm is None:  # in place: few operations for what a small model does most often
            pairs = product.view(torch.complex64).view(x_NH.shape[0], -1, self._size // 2)
            pairs[:, : self._heads + self._kv_heads].mul_(rotation)
            q, k, v = qkv.split_with_sizes([self._heads, self._kv_heads, self._kv_heads], dim=1)
            return q, k, v
        qk, v = qkv.split([self._heads + self._kv_heads, self._kv_heads], dim=1)
        qk = qk.float()
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self._size,), eps=self._eps) * layer.qk_norm
        turned = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotation
        qk = torch.view_as_real(turned).flatten(-2).to(self.dtype)
        q, k = qk.split([self._heads, self._kv_heads], dim=1)
        return q, k, v

    def _normed(self, x_NH: torch.Tensor, weight_H: torch.Tensor | None) -> torch.Tensor:
        """What a product takes of float32 hidden states."""
        return F.rms_norm(x_NH, x_NH.shape[-1:], weight_H, self._eps).to(self.dtype)

    def _feed_forward(self, layer: Layer, x_NH: torch.Tensor) -> None:
        gate, up = layer.gate_up(self._normed(x_NH, layer.after)).chunk(2, dim=-1)
        layer.down.add_to(x_NH, F.silu(gate).mul_(up))

    def _output(self, x_NH: torch.Tensor) -> Output:
        hidden = self._normed(x_NH, self._norm)
        return Output(hidden, self._head(hidden))

    def prefill(self, prompts: list[tuple[int, ...]], drafts: Sequence[int] = ()) -> Prefilled:
        """Run prompts; the last `drafts[i]` tokens of prompt i, if given, are a draft behind it."""
        B, P = len(prompts), max(map(len, prompts))
        x = self._embedding[self._padded(prompts).view(-1)]
        rotation = self._rotation[:P].repeat(B, 1, 1)
        keys, values = [], []
        for layer in self._layers:
            q, k, v = (t.view(B, P, -1, self._size).transpose(1, 2) for t in self._qkv(layer, x, rotation))
            keys.append(k.contiguous())  # views would keep the whole product alive, several times as large
            values.append(v.contiguous())
            layer.out.add_to(x, self._attend_all(q, k, v, None))
            self._feed_forward(layer, x)
        return self._prefilled(x, keys, values, prompts, drafts, [0] * B)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return logits of inputs of the lm_head."""
        return self._head(hidden_NH)

    def extend(self, tails: list[tuple[int, ...]], past: list[Kept], drafts: Sequence[int] = ()) -> Prefilled:
        """Go on with sequences whose beginnings are kept; `tails` holds what is new of each, at least one token.

        The tails have equal lengths unless `mixed_lengths`. `drafts`: as in `prefill`.
        """
        B, S = len(tails), max(map(len, tails))
        positions_BS, keys, values, mask = continued(past, S, self.dtype, self.device)
        rows = torch.arange(B, device=self.device)[:, None]
        x = self._embedding[self._padded(tails).view(-1)]
        # Padding may lie beyond the last position.
        rotation = self._rotation[positions_BS.view(-1).clamp(max=len(self._rotation) - 1)]
        for layer, all_keys, all_values in zip(self._layers, keys, values, strict=True):
            q, k, v = (t.view(B, S, -1, self._size) for t in self._qkv(layer, x, rotation))
            all_keys[rows, :, positions_BS] = k
            all_values[rows, :, positions_BS] = v
            layer.out.add_to(x, self._attend_all(q.transpose(1, 2), all_keys, all_values, mask))
            self._feed_forward(layer, x)
        return self._prefilled(x, keys, values, tails, drafts, [len(kept.tokens) for kept in past])

    def _padded(self, sequences: list[tuple[int, ...]]) -> torch.Tensor:
        longest = max(map(len, sequences))
        return torch.tensor([s + (0,) * (longest - len(s)) for s in sequences], device=self.device)

    def _attend_all(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of every position, [B, heads, S, D] each, as [B * S, heads * D]; without a mask it is causal."""
        shared = self._heads != self._kv_heads
        if shared and q.device.type != "cpu" and (mask is not None or q.dtype == torch.float32):
            return self._attend_in_groups(q, k, v, mask)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=shared
        )
        return attended.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def _attend_in_groups(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`_attend_all` without `enable_gqa`, for which PyTorch has only the math kernel on GPUs with a mask or in
        float32: it would hold all scores in float32. With a mask, heads of a group become further queries."""
        B, heads, S, _ = q.shape
        groups = heads // self._kv_heads
        if mask is None:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale)
        else:
            folded = q.reshape(B, self._kv_heads, groups * S, self._size)
            mask = mask.repeat(1, 1, groups, 1)
            attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=self._scale)
        return attended.reshape(B, heads, S, -1).transpose(1, 2).reshape(B * S, -1)

    def _prefilled(
        self,
        x: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        new: list[tuple[int, ...]],
        drafts: Sequence[int],
        before: list[int],
    ) -> Prefilled:
        """Return results from hidden states of the padded `new` tokens behind as many `before`."""
        longest, drafts = max(map(len, new)), drafts or [0] * len(new)
        ends = [i * longest + len(tokens) for i, tokens in enumerate(new)]
        lasts = [end - draft - 1 for end, draft in zip(ends, drafts, strict=True)]
        drafted = None
        if any(drafts):
            rows = [last + j for last, draft in zip(lasts, drafts, strict=True) for j in range(draft + 1)]
            hidden_NH = self._normed(x[torch.tensor(rows, device=self.device)], self._norm)
            lengths_B = np.array(drafts)
            drafted = Drafted(hidden_NH, np.cumsum(lengths_B + 1) - lengths_B - 1, lengths_B)
        lengths = [n + len(tokens) - draft for n, tokens, draft in zip(before, new, drafts, strict=True)]
        return Prefilled(keys, values, lengths, self._output(x[torch.tensor(lasts, device=self.device)]), drafted)

    def decode(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, cache: KVCache, chunks: list[Chunk]) -> Output:
        """Run one token of rows 0..N-1, write its keys and values to column `positions_N`, attend up to there."""
        return self._output(self._decoded(tokens_N, positions_N, cache, chunks))

    def _decode(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, cache: KVCache, chunks: list[Chunk]
    ) -> torch.Tensor:
        n, groups = tokens_N.shape[0], self._heads // self._kv_heads
        x = self._embedding[tokens_N]
        rotation = self._rotation[positions_N]
        index = (cache.open(positions_N, self._kv_heads),)
        attend = _attend_in_batches if self._folded and self.device.type == "cpu" else _attend
        masks = [cache.mask[a:b, None, None, :columns] for a, b, columns in chunks]
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            q, k, v = self._qkv(layer, x, rotation)
            keys.view(-1, self._size).index_put_(index, k)  # which reads views, unlike `index_copy_`
            values.view(-1, self._size).index_put_(index, v)
            q = q.reshape(n, self._kv_heads, groups, self._size)
            layer.out.add_to(x, attend(q, keys, values, masks, chunks, self._scale).view(n, -1))
            self._feed_forward(layer, x)
        return x


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    masks: list[torch.Tensor],
    chunks: list[Chunk],
    scale: float,
) -> torch.Tensor:
    """q: [N, heads, groups, D]; keys, values: [rows, heads, columns, D]; a mask, [rows, 1, 1, columns] of a chunk, is
    added. Returns the shape of q."""
    parts = []
    for (a, b, columns), mask in zip(chunks, masks, strict=True):
        some, k, v = q[a:b], keys[a:b, :, :columns], values[a:b, :, :columns]
        if q.device.type == "cpu":  # one query a head has a kernel of its own, a quarter faster
            some = some.reshape(b - a, -1, 1, q.shape[-1])
        shared = some.shape[1] != k.shape[1]
        done = F.scaled_dot_product_attention(some, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)
        parts.append(done.view(b - a, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_in_batches(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    masks: list[torch.Tensor],
    chunks: list[Chunk],
    scale: float,
) -> torch.Tensor:
    """`_attend` for float32 on a CPU, where the queries have the scale: two batched products take half the time of the
    fused kernel on short rows, and the same on long ones."""
    heads, attended = q.shape[1], torch.empty_like(q)
    each, into, keys, values = (t.flatten(0, 1) for t in (q, attended, keys, values))
    for (a, b, columns), mask in zip(chunks, masks, strict=True):
        rows = slice(a * heads, b * heads)
        mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(mask, each[rows], keys[rows, :columns].transpose(1, 2))
        torch.bmm(scores.softmax(-1), values[rows, :columns], out=into[rows])
    return attended
