"""The model a run starts with: by name or as an object, a whole model or an adapter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..base.dotted import nearest
from ..base.errors import ConfigError
from ..base.weights import without_embedding
from ..config import RunConfig
from ..config.options import OF_ADAPTER, LoraConfig
from .loading import CPU, ModelReference, build_meta_model, load_causal_lm, quantization_of, resolve_device
from .lora import Adapter, adapter_at, merged, taken_apart
from .pretrained import located
from .saving import types_by_name, types_in, types_of


@dataclass(frozen=True)
class InitialModel:
    """What is known of the model before its weights are loaded."""

    source: str
    """Directory or hub name, or what an object is called."""
    model: Any = None
    """A model given as an object, without its adapter; None: it is named."""
    adapter: Adapter | None = None
    resume: bool = False
    """Whether the adapter is trained further; else it is merged."""
    meta_model: Any = None
    """Names and shapes of all tensors; None until they are read."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of the tensors by name or pattern, for `save_dtype: auto`."""

    @classmethod
    def from_config(cls, c: RunConfig, given: Any = None) -> InitialModel:
        """Return the model that a run starts with; `given`: a loaded model; None: the configuration's.

        Raises ConfigError for an object that cannot be trained, an adapter that cannot be used, and for `lora.resume`
        without an adapter.
        """
        if given is not None:
            _make_plain(given)
        model, adapter = taken_apart(given) if given is not None else (None, adapter_at(c.model))
        resume = c.lora is not None and c.lora.resume
        if resume and adapter is None:
            raise ConfigError(
                f"lora.resume: '{c.model}' is not a LoRA adapter (no adapter_config.json); remove resume to train a "
                "new adapter, or name the adapter as model"
            )
        return cls(c.model, model, adapter, resume)

    def read(self, c: RunConfig) -> InitialModel:
        """Return it with what `resolve` needs: names, shapes and, if they decide `save_dtype`, dtypes."""
        meta_model = self.model if self.model is not None else build_meta_model(self.source)
        if c.save_dtype != "auto":
            return replace(self, meta_model=meta_model)
        dtypes = types_in(self.model) if self.model is not None else types_of(self.source)
        if self.resume and self.adapter is not None:
            kinds = list(types_by_name(self.adapter.read()).values())
            dtypes["*.lora_*"] = kinds[0] if kinds else "float32"
        return replace(self, meta_model=meta_model, dtypes=dtypes)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.meta_model.parameters())

    @property
    def positions(self) -> int | None:
        """Most tokens of a sequence, as far as the model limits them."""
        most: int | None = getattr(self.meta_model.config.get_text_config(), "max_position_embeddings", None)
        return most

    def decides(self, c: RunConfig) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the keys that the adapter and the weights' dtypes decide, and why."""
        values: dict[str, Any] = {}
        why = {}
        if self.adapter is not None:
            what = f"a LoRA adapter of rank {self.adapter.ranks} over {self.adapter.base}"
            trained = "all weights are" if c.lora is None else "a new adapter is"
            why["model"] = (
                f"{what}, merged into it: {trained} trained; lora: {{resume: true}} would train the adapter itself"
            )
            if c.lora is not None and self.resume:
                why["model"] = f"{what}, which is trained on"
                values["lora"] = completed_lora(c.lora, self.adapter)
        if c.save_dtype == "auto":
            dtypes = dict(self.dtypes)
            if len(dtypes) > 1:  # a file may hold tensors that the model does not
                names = {"*", "*.lora_*", *self.meta_model.state_dict()}
                dtypes = {name: kind for name, kind in dtypes.items() if name in names}
            one = len(set(dtypes.values())) == 1  # else dtypes by name
            values["save_dtype"] = next(iter(dtypes.values())) if one else dtypes or "auto"
        return values, why

    def require_names(self, c: RunConfig) -> None:
        """Raise ConfigError for a pattern of `save_dtype` that no tensor's name matches."""
        if isinstance(c.save_dtype, dict) and c.lora is None:  # names of adapters are known once they are made
            names = list(self.meta_model.state_dict())
            for pattern in c.save_dtype:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"save_dtype: no tensor of the model is called '{pattern}'.{nearest(pattern, names)} "
                        f"One is '{names[-1]}'"
                    )

    def load(self) -> tuple[Any, Adapter | None]:
        """Load the model on the CPU in float32 (an object in float64 stays so), and the adapter to train. Call once."""
        if self.model is None:
            base = load_causal_lm(self.source if self.adapter is None else self.adapter.base, CPU)
        else:
            half = any(p.dtype in (torch.bfloat16, torch.float16) for p in self.model.parameters())
            base = self.model.to(CPU, torch.float32) if half else self.model.to(CPU)
        if self.adapter is None or self.resume:
            return base, self.adapter
        return merged(base, self.adapter), None

    def reference(self, device: str, base: Any, adapters: LoraConfig | None) -> ModelReference:
        """Return what an engine serves, and on which device; without a directory of these weights, `base` alone.

        `adapters`: those that are published alone; None: whole weights are.
        """
        plain = self.model is None and self.adapter is None
        return ModelReference(located(self.source) if plain else "", resolve_device(device), base, adapters)


def _make_plain(model: Any) -> None:
    """Let the attention of a given object, which may have adapters, take any mask.

    Raises ConfigError for quantized weights, and for weights that accelerate moves around.
    """
    if kind := quantization_of(model.config):
        raise ConfigError(
            f"model: the object is quantized ({kind}) and cannot be trained; load it without quantization_config, and "
            "set lora: {r: 16} if memory is short"
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ConfigError("model: the object is on several devices or offloaded; load it without device_map")
    if (attention := model.config.get_text_config()._attn_implementation) not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        if model.config.get_text_config()._attn_implementation == attention:
            raise ConfigError(
                f"model: attn_implementation: {attention} cannot take the masks of engine and learner, and its class "
                "cannot change it; load it with attn_implementation='eager'"
            )
        warnings.warn(
            f"model: attn_implementation: {attention} cannot take the masks of engine and learner; "
            f"{model.config._attn_implementation} is used",
            stacklevel=2,
        )


def completed_lora(lora: LoraConfig, adapter: Adapter) -> LoraConfig:
    """Fill in `lora` from the adapter. Raises ConfigError where the configuration differs.

    Dropout may differ: it is how the adapter is trained, not what it is.
    """
    s = adapter.settings
    targets = s.get("target_modules")
    own = {
        "r": s.get("r", 8),
        "alpha": s.get("lora_alpha", 8),
        "target_modules": targets if isinstance(targets, str) else sorted(targets or []),
        "dropout": s.get("lora_dropout", 0.0) if lora.dropout is None else lora.dropout,
    }
    for key in OF_ADAPTER:
        value = getattr(lora, key)
        same = sorted(value) == own[key] if isinstance(value, list) else value == own[key]
        if value is not None and not same:
            raise ConfigError(
                f"lora.{key}: {value} differs from the adapter's {own[key]} ({adapter.name}), which is trained on as "
                f"it is; leave {key} out, or leave out resume to merge the adapter and train a new one"
            )
    return lora.model_copy(update=own)


def require_embeddings(model: Any, tokenizer: Any, source: str, adapter: Adapter | None = None) -> None:
    """Raise ConfigError if the tokenizer has tokens without an embedding: see `without_embedding`."""
    rows, beyond = without_embedding(model, tokenizer)
    if not beyond:
        return
    ids = max(beyond) + 1
    if adapter is not None:
        raise ConfigError(
            f"model: the tokenizer of '{adapter.source}' has {ids} tokens, the base {rows} embeddings, and the "
            "adapter adds none; save it with save_embedding_layers=True"
        )
    first = tokenizer.eos_token_id if tokenizer.eos_token_id in beyond else min(beyond)
    what = "the end of sequence" if first == tokenizer.eos_token_id else "a token"
    raise ConfigError(
        f"model: the tokenizer has {ids} tokens, '{source}' {rows} embeddings: {what} '{beyond[first]}' (id {first}) "
        f"has none. Call model.resize_token_embeddings({ids}) and save the model (new embeddings need training, e.g. "
        "by winnow warm-start), or use the tokenizer that belongs to the model"
    )
