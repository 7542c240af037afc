"""A LoRA adapter as the starting model: read, merged into its base, or extracted from a loaded model.

An adapter is untrusted data: its settings are read as JSON and checked key by key; its weights are safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..base.errors import ConfigError
from ..base.files import bytes_of, from_json
from ..base.machine import install
from ..base.weights import is_finite
from .pretrained import file_of, located

SETTINGS, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TRAINED = frozenset(
    {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "use_rslora"}
    | {"layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"}
)
"""Adapter settings that support further training."""
MERGED = TRAINED | {"bias", "use_dora", "modules_to_save", "ensure_weight_tying", "target_parameters"}
MERGED |= {"trainable_token_indices"}
"""Adapter settings that support merging."""
UNUSED = frozenset(
    {"peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "inference_mode"}
    | {"init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config"}
    | {"megatron_core", "qalora_group_size", "runtime_config", "velora_config"}
)
"""Settings that have no effect once weights exist. Some initialisations change the base: see `PLAIN`."""
PLAIN = (True, False, None, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base model unchanged."""
PREFIX = "base_model.model."
PROBE = 16
"""Tokens for comparing a merged model with its adapter."""


@dataclass(frozen=True)
class Adapter:
    """An adapter with checked settings."""

    source: str
    """Directory or hub name; for an object, its class."""
    settings: Mapping[str, Any]
    """Contents of adapter_config.json."""
    base: str
    """Directory or hub name of the base model."""
    given: Mapping[str, torch.Tensor] | None = None
    """Weights of an adapter passed as an object."""

    @property
    def name(self) -> str:
        """Return the source of the settings, for messages."""
        return f"{self.source}/{SETTINGS}" if self.given is None else self.source

    @property
    def all_ranks(self) -> list[int]:
        return [self.settings.get("r", 8), *(self.settings.get("rank_pattern") or {}).values()]

    @property
    def ranks(self) -> str:
        return " and ".join(map(str, sorted(set(self.all_ranks))))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the weights in float32. Raises ConfigError as `read` does, and if they are not finite."""
        tensors = self.read()
        if wrong := next((name for name, tensor in tensors.items() if not is_finite(tensor)), None):
            raise ConfigError(f"model: the adapter '{self.source}' is not finite ({wrong})")
        return {name: tensor.float() for name, tensor in tensors.items()}

    def read(self) -> Mapping[str, torch.Tensor]:
        """Return the weights as saved. Raises ConfigError if they are missing, pickled or damaged."""
        if self.given is not None:
            return self.given
        file = file_of(self.source, WEIGHTS)
        if file is None:
            pickled = file_of(self.source, PICKLED) is not None
            what = f"only {PICKLED}, a pickle, which is not read" if pickled else f"no {WEIGHTS}"
            raise ConfigError(f"model: the adapter '{self.source}' has {what}; save it again as {WEIGHTS}")
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model: {file}: cannot be read ({error})") from None

    def peft_config(self, dropout: float = 0.0) -> Any:
        """Return a peft config. Raises ConfigError without peft, and for values that peft rejects."""
        try:
            import peft
        except ImportError:
            raise ConfigError(f"model: '{self.source}' is an adapter and needs peft; {install('peft')}") from None
        values = {key: value for key, value in self.settings.items() if key in MERGED and value}
        values["lora_dropout"] = dropout
        try:
            return peft.LoraConfig(**values, task_type="CAUSAL_LM")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: {error}; restore the file that belongs to the weights") from None

    def require_trainable(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigError for an adapter that can only be merged."""
        key = next((key for key in sorted(MERGED - TRAINED) if _set(key, self.settings.get(key))), None)
        what = f"{key}: {self.settings[key]!r}" if key else next((n for n in tensors if ".lora_" not in n), "")
        if what:
            raise ConfigError(
                f"lora.resume: an adapter with {what} ({self.name}) cannot be trained on; leave `lora` out to merge it "
                "and train the whole model"
            )


def adapter_at(source: str | Path) -> Adapter | None:
    """Return the adapter in a directory or on the hub; None if the source is an ordinary model.

    Raises ConfigError, naming file, key and remedy, for an unusable adapter.
    """
    file = file_of(source, SETTINGS)
    if file is None:
        return None
    try:
        settings = from_json(bytes_of(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {file}: cannot be read ({error})") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"model: {file}: expected settings, found {type(settings).__name__}")
    adapter = Adapter(str(source), settings, "")
    _check(adapter)
    return replace(adapter, base=_base_of(adapter, file.parent))


def _check(adapter: Adapter) -> None:
    """Raise ConfigError for an adapter of another kind, and for settings that would be ignored."""
    s, name = adapter.settings, adapter.name
    if (kind := s.get("peft_type")) != "LORA":
        raise ConfigError(f"model: {name}: peft_type: {_shown(kind)}; only LORA adapters can be merged or trained on")
    if (task := s.get("task_type")) not in (None, "CAUSAL_LM"):
        raise ConfigError(f"model: {name}: task_type: {_shown(task)}; the adapter of a CAUSAL_LM is needed")
    if (init := s.get("init_lora_weights", True)) not in PLAIN:
        raise ConfigError(
            f"model: {name}: init_lora_weights: {_shown(init)} changed the base model; convert the adapter to a plain "
            "LoRA (peft: save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )
    if s.get("revision") not in (None, "main"):
        raise ConfigError(
            f"model: {name}: revision: {_shown(s['revision'])} of the base is not fetched; download it, set "
            "base_model_name_or_path to its directory and remove revision"
        )
    targets = s.get("target_modules")
    listed = isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets)
    if not (targets is None or isinstance(targets, str) or listed):
        raise ConfigError(
            f"model: {name}: target_modules: expected a name or a list of names, not {_shown(targets)}; restore the "
            "file that belongs to the weights"
        )
    patterns = s.get("rank_pattern") or {}
    if not isinstance(patterns, dict) or any(type(r) is not int for r in (s.get("r", 8), *patterns.values())):
        shown = f"r: {_shown(s.get('r'))}, rank_pattern: {_shown(patterns)}"
        raise ConfigError(f"model: {name}: {shown}: ranks are integers; restore the file that belongs to the weights")
    for key, value in s.items():
        if key not in MERGED | UNUSED | {"revision"} and _set(key, value):
            raise ConfigError(f"model: {name}: {key}: {_shown(value)} is not supported; merge the adapter with peft")


def _set(key: str, value: Any) -> bool:
    return bool(value) and (key, value) != ("bias", "none")


def _shown(value: Any) -> str:
    return f"{getattr(value, 'value', value)!s:.80}"


def _base_of(adapter: Adapter, folder: Path) -> str:
    """Return the base's directory or hub name; relative paths are below the working or the adapter's directory."""
    named = adapter.settings.get("base_model_name_or_path")
    key = f"model: {adapter.name}: base_model_name_or_path"
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{key}: names no base model ({named!r}); set it to the base's directory or hub name")
    places = [Path(located(named)).expanduser(), folder / named]
    kinds = "config.json", SETTINGS
    found = next((place for place in places for kind in kinds if (place / kind).is_file()), None)
    if found is None:
        if not any(file_of(named, kind) for kind in kinds):
            raise ConfigError(
                f"{key}: '{named}' is no directory with a model, and no model on a hub that answers; set it to the "
                "base's directory or hub name"
            )
        return named
    if found.resolve() == folder.resolve():
        raise ConfigError(f"{key}: '{named}' is the adapter's own directory; set it to the base's directory")
    return str(found.resolve())


def with_adapter(base: Any, adapter: Adapter, dropout: float = 0.0) -> Any:
    """Return `base` with the adapter added by peft. Raises ConfigError if the adapter fits another model."""
    options = adapter.peft_config(dropout)
    import peft

    tensors = adapter.tensors()
    _require_ranks(adapter, tensors)
    _resize(base, tensors)
    try:
        with torch.random.fork_rng(devices=[]):
            model = peft.get_peft_model(base, options)
        done: Any = peft.set_peft_model_state_dict(model, dict(tensors))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model: the adapter '{adapter.source}' does not fit '{adapter.base}': {first}") from None
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrong = sorted({*done.unexpected_keys, *(own & set(done.missing_keys))})
    if wrong:
        raise ConfigError(
            f"model: the weights of the adapter '{adapter.source}' are not those of {adapter.name}: {wrong[0]} "
            "differs; restore the file that belongs to them"
        )
    return model


def _require_ranks(adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check ranks before peft allocates the layers that the settings describe, of any size."""
    most = max((max(t.shape, default=0) for n, t in tensors.items() if ".lora_" in n), default=0)
    if wrong := [r for r in adapter.all_ranks if not 0 < r <= most]:
        raise ConfigError(
            f"model: {adapter.name}: rank {_shown(wrong[0])} is not that of the weights; restore the file"
        )


def _resize(base: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Resize the base's embeddings to the number of tokens in the adapter's."""
    ends = [end for end in (base.get_input_embeddings(), base.get_output_embeddings()) if end is not None]
    for name, module in base.named_modules():
        if not any(module is end for end in ends):
            continue
        own = (tensors.get(f"{PREFIX}{name}{part}.weight") for part in ("", ".base_layer"))
        rows = next((len(tensor) for tensor in own if tensor is not None), len(module.weight))
        if rows != len(module.weight):
            with torch.random.fork_rng(devices=[]):
                base.resize_token_embeddings(rows, mean_resizing=False)
            return


@torch.no_grad()
def merged(base: Any, adapter: Adapter) -> Any:
    """Return `base` with the adapter merged into its weights, all of them trainable.

    Raises ConfigError if the result is not the policy of base and adapter.
    """
    model = with_adapter(base, adapter).eval()
    ids = torch.arange(1, PROBE + 1, device=base.device)[None] % base.get_input_embeddings().weight.shape[0]
    before = model(input_ids=ids).logits
    _untie_adapted(base)
    try:
        whole = model.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"model: the adapter '{adapter.source}' cannot be merged: {error}") from None
    vars(whole).pop("peft_config", None)
    ends = [end.weight for end in (whole.get_input_embeddings(), whole.get_output_embeddings())]
    tied = whole.config.get_text_config().tie_word_embeddings
    if tied and ends[0] is not ends[1]:
        whole.config.tie_word_embeddings = whole.config.get_text_config().tie_word_embeddings = False
    gap = float((whole(input_ids=ids).logits - before).abs().max())
    if not gap <= 1e-3 * max(1.0, float(before.abs().max())) or not math.isfinite(gap):
        raise ConfigError(
            f"model: the adapter '{adapter.source}' cannot be merged: logits change by {gap:.2g}; merge it with peft"
        )
    whole.name_or_path = adapter.source
    return whole.requires_grad_(True)


def _untie_adapted(base: Any) -> None:
    """Split a tied weight with an adapter at one end: merging would change both ends."""
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    inner = [getattr(end, "base_layer", end) if hasattr(end, "lora_A") else end for end in ends]
    if inner != list(ends) and inner[0].weight is inner[1].weight:
        inner[1].weight = torch.nn.Parameter(inner[1].weight.detach().clone())


def taken_apart(model: Any) -> tuple[Any, Adapter | None]:
    """Return base and adapter of a `PeftModel` or a transformers model with adapters; other models unchanged.

    The base belongs to that object. Raises ConfigError if it has several adapters.
    """
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return model, None
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if len(adapters) > 1:
        raise ConfigError(
            f"model: the {type(model).__name__} has {len(adapters)} adapters ({', '.join(adapters)}); remove all but "
            "the one to train, or merge them"
        )
    (name, options), base = next(iter(adapters.items())), model
    kind = f"the {type(model).__name__}"
    settings = {k: sorted(v) if isinstance(v, set) else v for k, v in options.to_dict().items()}
    adapter = Adapter(kind, settings, str(options.base_model_name_or_path or "its base"), {})
    _check(adapter)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    for _, layer in layers:
        if layer.merged:
            layer.unmerge()
    state = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {PREFIX + n.removeprefix(PREFIX): t.detach().clone() for n, t in state.items()}
    if isinstance(model, peft.PeftModel):
        base = model.get_base_model()
    outer = "."
    for n, module in list(base.named_modules()):
        if n.startswith(f"{outer}."):
            continue  # it went with what it was inside of
        if isinstance(module, BaseTunerLayer):
            base.set_submodule(outer := n, module.get_base_layer())
        elif isinstance(module, AuxiliaryTrainingWrapper):
            base.set_submodule(outer := n, module.original_module)
    base._hf_peft_config_loaded = False
    vars(base).pop("peft_config", None)
    return base.requires_grad_(True), replace(adapter, given=tensors)
