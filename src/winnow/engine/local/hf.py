"""The choice of a backend, and the backend for any causal LM with an ordinary KV cache: its own forward pass."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ...base.errors import ConfigError
from ...base.weights import state_once
from ..facts import WINDOWS, Facts, has_local_layers
from ..loading import quantization_of
from ..sampling import sample
from .backend import Kept, Output, Prefilled, continued
from .cache import Chunk, KVCache
from .llama import LlamaBackend, unlike_llama

ORDINARY = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
MOST_GAP, MOST_GAP_IN_HALF = 1e-3, 0.2
"""Most that a cache may change log-probabilities in a trial run, in nats, on average over what would be sampled.
Rounding moves the rare tokens of a long vocabulary further."""


def refuse_unsupported(model: Any, max_length: int | None) -> None:
    """ValueError for a model with quantized weights, or whose cache is not one key and value a token, as far as its
    config tells."""
    name, config = type(model).__name__, model.config.get_text_config()
    if kind := quantization_of(model.config):
        raise ValueError(f"{name} is quantized ({kind}); load it without quantization_config for the embedded engine")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; the embedded engine runs decoder-only models")
    strange = set(getattr(config, "layer_types", None) or ()) - ORDINARY
    if strange or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps recurrent state ({sorted(strange) or 'stateful model'}); the embedded engine needs an "
            "ordinary KV cache: use another engine or model"
        )
    for option in (*WINDOWS, *(["window_size"] if has_local_layers(config) else [])):
        window = getattr(config, option, None)
        kinds = getattr(config, "layer_types", None)
        if window is None or (kinds and set(kinds) == {"full_attention"}):
            continue
        most = window if option in WINDOWS else window - window % 64  # of columns, which decoding reads rounded up
        if max_length is None or max_length > most:
            what = f"{name} has {option}={window}, and the embedded engine attends to whole sequences"
            if most < 2:  # no prompt with a completion is so short
                raise ValueError(f"{what}; use another engine or model")
            raise ValueError(
                f"{what}; set the engine's max_length (engine.max_length in a configuration) to at most {most}; "
                f"it is {max_length}"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        switch = part.get("original_max_position_embeddings") if part.get("rope_type") == "longrope" else None
        if switch is not None and (max_length is None or max_length > switch):
            raise ValueError(
                f"{name} has other position embeddings in a pass with a sequence of over {switch} tokens (longrope), "
                "and the embedded engine decodes sequences of different lengths together; set the engine's max_length "
                f"(engine.max_length in a configuration) to at most {switch}; it is {max_length}"
            )


class _SlotLayer(CacheLayerMixin):
    """One layer of `KVCache`, or of kept sequences, as the model sees it when S tokens of each of N rows are run."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions_NS: torch.Tensor, columns: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._positions, self._columns = positions_NS, columns
        self._rows = torch.arange(len(positions_NS), device=positions_NS.device)[:, None]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the cache is preallocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        n = len(self._rows)
        self.keys[self._rows, :, self._positions] = key_states.transpose(1, 2)
        self.values[self._rows, :, self._positions] = value_states.transpose(1, 2)
        return self.keys[:n, :, : self._columns], self.values[:n, :, : self._columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns, 0

    def get_seq_length(self) -> int:
        return self._columns - self._positions.shape[1]

    def get_max_length(self) -> int:
        return self._columns


class HFBackend:
    mixed_lengths = False
    sample = staticmethod(sample)

    def __init__(self, model: Any, *, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        parameters = inspect.signature(model.forward).parameters
        head = model.get_output_embeddings()
        if head is None or not {"position_ids", "past_key_values"} <= parameters.keys():
            raise ValueError(f"{type(model).__name__} has no position_ids or lm_head: the engine cannot run it")
        self.device, self.dtype, self.vocab_size = device, dtype, vocab_size
        self._float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        # A copy, for the learner changes its model in place; tensor by tensor, in the type that they end in.
        own = {id(buffer): self._cast(name, buffer) for name, buffer in model.named_buffers()}
        own |= {id(p): nn.Parameter(self._cast(name, p), False) for name, p in model.named_parameters()}
        self._model = copy.deepcopy(model, own).eval()
        text = self._model.config.get_text_config()
        if hasattr(text, "output_router_logits"):  # of a fine-tuned mixture; a loss of routers cannot take our masks
            text.output_router_logits = False
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._hidden: torch.Tensor | None = None
        self._model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)
        try:
            probe = self.prefill([(0, 0)])
            pairs = zip(probe.keys, probe.values, strict=True)
            self.kv_shapes = [((k.shape[1], k.shape[3]), (v.shape[1], v.shape[3])) for k, v in pairs]
            gap = self._cache_gap()
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
            raise ValueError(f"{type(model).__name__} failed in the embedded engine's trial run: {error}") from error
        half = dtype in (torch.bfloat16, torch.float16)
        if not gap < (MOST_GAP_IN_HALF if half else MOST_GAP):
            remedy = "; if it is right, set the engine's dtype to float32" if half else ""
            raise ValueError(
                f"{type(model).__name__} gives other log-probabilities with a cache of rows of different lengths than "
                f"without (gap {gap:.3g}): the embedded engine cannot run it{remedy}"
            )

    @property
    def unlike_llama(self) -> str:
        """Why it is not `LlamaBackend` that runs the model."""
        return unlike_llama(self._model)

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rotary frequencies keep their type: rounded ones turn late positions by wrong angles. So does what the class
        has in float32, such as the biases by which experts are chosen."""
        kept = name.endswith("inv_freq") or not tensor.is_floating_point()
        kept |= any(part in name for part in self._float32)
        return tensor.detach().to(self.device, tensor.dtype if kept else self.dtype, copy=True)

    def _keep_hidden(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._hidden = args[0]

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        own = self._model.state_dict(keep_vars=True)
        for name in state_once(self._model):
            own[name].data = state[name].to(self.device, own[name].dtype, copy=True)

    def release(self) -> None:
        for tensor in self._model.state_dict(keep_vars=True).values():
            tensor.data = tensor.new_empty(0)

    def _forward(self, ids: torch.Tensor, **inputs: Any) -> Output:
        logits = self._model(input_ids=ids, use_cache=True, **inputs, **self._last_only).logits[:, -1]
        assert self._hidden is not None
        return Output(self._hidden.view(len(ids), -1, self._hidden.shape[-1])[:, -1], logits[:, : self.vocab_size])

    def prefill(self, prompts: list[tuple[int, ...]], drafts: Sequence[int] = ()) -> Prefilled:
        cache = DynamicCache()
        ids = torch.tensor(prompts, device=self.device)
        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        last = self._forward(ids, past_key_values=cache, position_ids=positions)
        layers: list[Any] = cache.layers
        if any(not isinstance(layer.keys, torch.Tensor) or layer.keys.shape[2] != ids.shape[1] for layer in layers):
            raise ValueError("it has no ordinary KV cache")
        return Prefilled([x.keys for x in layers], [x.values for x in layers], [len(p) for p in prompts], last)

    def extend(self, tails: list[tuple[int, ...]], past: list[Kept], drafts: Sequence[int] = ()) -> Prefilled:
        ids = torch.tensor(tails, device=self.device)
        positions_BS, keys, values, mask = continued(past, ids.shape[1], self.dtype, self.device)
        last = self._cached(ids, positions_BS, keys, values, mask)
        return Prefilled(keys, values, [int(p) + 1 for p in positions_BS[:, -1]], last)

    def decode(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, cache: KVCache, chunks: list[Chunk]) -> Output:
        columns = max(chunk.columns for chunk in chunks)
        cache.open(positions_N, 1)
        mask = cache.mask[: len(tokens_N), None, None, :columns]
        return self._cached(tokens_N[:, None], positions_N[:, None], cache.keys, cache.values, mask)

    def _cached(
        self,
        ids_NS: torch.Tensor,
        positions_NS: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        mask: torch.Tensor,
    ) -> Output:
        """Run tokens whose predecessors are in `keys` and `values`, which take in those of the tokens too."""
        layers: list[Any] = [_SlotLayer(k, v, positions_NS, mask.shape[-1]) for k, v in zip(keys, values, strict=True)]
        return self._forward(
            ids_NS, past_key_values=Cache(layers=layers), position_ids=positions_NS, attention_mask=mask
        )

    def _cache_gap(self) -> float:
        """Return what is compared with `MOST_GAP`: of two sequences of different lengths, the one that differs more."""
        sequences = [tuple((7 * i + 3 * j + 1) % self.vocab_size for j in range(4 + 3 * i)) for i in range(2)]
        cache = KVCache(self.kv_shapes, 2, self.dtype, self.device)
        cache.reserve(2, 16)
        for row, sequence in enumerate(sequences):
            done = self.prefill([sequence[:-2]])
            only = torch.zeros(1, dtype=torch.int64, device=self.device)
            cache.insert(slice(row, row + 1), only, done.keys, done.values, [len(sequence) - 2])
        for back in (2, 1):
            tokens = torch.tensor([s[-back] for s in sequences], device=self.device)
            positions = torch.tensor([len(s) - back for s in sequences], device=self.device)
            cached = self.decode(tokens, positions, cache, [Chunk(0, 2, 16)]).logits_NV
        plain = torch.cat([self.prefill([s]).last.logits_NV for s in sequences]).float().log_softmax(-1)
        gap_N = (plain.exp() * (cached.float().log_softmax(-1) - plain).abs()).sum(-1)
        return float(gap_N.max())


def make_backend(
    model: Any, facts: Facts, dtype: str | None, device: torch.device | str | None, fused_kernels: bool = False
) -> HFBackend | LlamaBackend:
    """Copies the model's weights. Raises ConfigError where fused kernels are wanted and cannot be had."""
    refuse_unsupported(model, facts.max_length)
    weight = model.get_input_embeddings().weight
    kind = weight.dtype if dtype is None else getattr(torch, dtype)
    place = weight.device if device is None else torch.device(device)
    with torch.no_grad():  # not inference_mode: its tensors could not be overwritten by new weights
        why = unlike_llama(model)
        if facts.max_length is not None and not why:
            sizes = {"vocab_size": facts.vocab_size, "max_length": facts.max_length}
            backend = _fused_backend(kind, place) if fused_kernels else LlamaBackend
            return backend(model, **sizes, dtype=kind, device=place)
        if fused_kernels:
            raise ConfigError(f"engine: fused_kernels: {why or 'max_length is missing'}; leave it out")
        return HFBackend(model, vocab_size=facts.vocab_size, dtype=kind, device=place)


def _fused_backend(dtype: torch.dtype, device: torch.device) -> type[LlamaBackend]:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("engine: fused_kernels: Triton is not installed; pip install triton, or leave it out")
    from .fused import FusedLlamaBackend, require

    require(dtype, device)
    return FusedLlamaBackend
