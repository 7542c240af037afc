"""Load Hugging Face models and tokenizers from a directory or a hub name to a device."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from ..base.errors import ConfigError
from ..base.machine import install
from ..config.options import LoraConfig
from .lora import SETTINGS, adapter_at, merged
from .pretrained import file_of, hub_answers, located

WEIGHTS = ("*.safetensors", "*.bin")
MIN_BYTES_PER_PARAMETER = 0.1
"""Quantised weights have 0.25 or more; shared weights count once."""
MAX_LAYERS = 2_000
CPU = torch.device("cpu")
_LOADING = threading.Lock()
"""Serializes loading: with two threads at once, transformers treats tied weights as missing."""


@dataclass(frozen=True)
class ModelReference:
    """The model an engine serves, its device, and its weights as version 0."""

    source: str
    """Directory or hub name of a Hugging Face model, not a Winnow short name; empty for an object, which may be in
    neither."""
    device: torch.device
    loaded: Any = None
    """The model, on any device, if this process already has it; it belongs to the caller."""
    adapters: LoraConfig | None = None
    """If set, later weights are these adapters alone, for an engine that provides `adapters`. None: whole weights."""

    def load(self) -> Any:
        """Return the Hugging Face model, read to the CPU unless already loaded: engines copy it to their device and
        dtype. Raises ConfigError as `load_causal_lm` does."""
        return load_causal_lm(self.source, CPU) if self.loaded is None else self.loaded

    def described(self) -> Any:
        """Return the model, on the meta device unless already loaded. Raises ConfigError as `load` does."""
        if self.loaded is not None:
            return self.loaded
        model = build_meta_model(self.source)
        set_generation_config(model, self.source)
        return model


def quiet_transformers() -> None:
    """Hide transformers' progress bars, which would disturb our display."""
    logging.disable_progress_bar()


def resolve_device(name: str) -> torch.device:
    """Return the device with this name; `auto` picks a GPU if available. Raises ConfigError if it is unusable."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {name} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        prepare_cuda()
    return device


def prepare_cuda(*, deterministic: bool = False) -> None:
    """Configure this process for a GPU; `deterministic` lasts until the process exits.

    cuDNN's attention builds a plan for every new shape, about a second each, and RL batches have new shapes in every
    step. PyTorch prefers it on Hopper and Blackwell; flash and memory-efficient attention need no plans.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        torch.use_deterministic_algorithms(True)


def load_tokenizer(source: str | Path) -> Any:
    """Return the tokenizer of a model or adapter; an adapter without one uses its base's.

    Raises ConfigError when it is missing, or needs code from the model's repository.
    """
    adapter = adapter_at(source)
    if adapter is not None and file_of(source, "tokenizer_config.json") is None:
        whole_under(source)
        return load_tokenizer(adapter.base)
    return _load(AutoTokenizer, source, "tokenizer")


def load_causal_lm(source: str | Path, device: torch.device) -> Any:
    """Return a float32 causal LM; an adapter is merged into its base.

    Raises ConfigError if loading needs foreign code or the weights are incomplete.
    """
    adapter = adapter_at(source)
    if adapter is None:
        return load_whole(source, device)
    whole_under(source)  # raises if adapters form a cycle
    return merged(load_causal_lm(adapter.base, device), adapter)


def whole_under(source: str | Path) -> str:
    """Return the source itself, or the model below all adapters. Raises ConfigError if adapters form a cycle."""
    sources = [str(source)]
    while (adapter := adapter_at(sources[-1])) is not None:
        if adapter.base in sources:
            raise ConfigError(
                f"model: {adapter.name}: base_model_name_or_path: is an adapter over this one; correct it"
            )
        sources.append(adapter.base)
    return sources[-1]


def load_whole(source: str | Path, device: torch.device) -> Any:
    """Return a float32 causal LM from a directory or hub name with whole weights, not an adapter."""
    require_whole(source)
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, info = _load(AutoModelForCausalLM, source, "model", **options)
    if info["missing_keys"]:
        shown = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"model: '{source}' lacks weights, which would start at random: {shown}")
    return model.to(device)


def require_whole(source: str | Path) -> None:
    """Raise ConfigError for an adapter, for weights that do not match the config, and for quantized weights."""
    if file_of(source, SETTINGS) is not None:
        raise ConfigError(f"model: '{source}' is an adapter, and a whole model is needed here")
    _require_weights_for(source)
    kind = quantization_of(load_model_config(source))
    if kind not in ("", "mxfp4"):  # transformers de-quantizes mxfp4
        raise ConfigError(
            f"model: '{source}' is quantized ({kind}) and cannot be trained; name the model that it was made from (for "
            "an adapter: as base_model_name_or_path in its adapter_config.json)"
        )


def quantization_of(config: Any) -> str:
    """Return how the weights of a model with this config are quantized; empty: they are not."""
    quantized = getattr(config, "quantization_config", None) or {}
    kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
    return str(getattr(kind, "value", kind) or "")


def load_model_config(source: str | Path) -> Any:
    """Return the config of a model, or of the model below an adapter. Raises ConfigError as `load_causal_lm` does."""
    return _load(AutoConfig, whole_under(source), "model")


def _require_weights_for(source: str | Path) -> None:
    """Raise ConfigError if a directory's config describes a far larger model than its files hold.

    transformers would first create the missing weights at random, using any amount of memory.
    """
    directory = Path(located(str(source)))
    held = sum(file.stat().st_size for pattern in WEIGHTS for file in directory.glob(pattern))
    if not held:
        return
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        layers = config.get_text_config().num_hidden_layers
        model = _on_meta(config) if layers <= MAX_LAYERS else None
    except Exception:  # the loader reads the same files and reports the error
        return
    parameters = sum(p.numel() for p in model.parameters()) if model is not None else None
    if parameters is None or parameters > held / MIN_BYTES_PER_PARAMETER:
        described = f"{layers} layers" if parameters is None else f"{parameters:,} parameters"
        raise ConfigError(
            f"model: the config.json of '{source}' describes {described}, its weights are {held:,} bytes; restore "
            "the file that belongs to them"
        )


def peft_config(lora: LoraConfig) -> Any:
    """Return our options as a peft `LoraConfig`. Raises ConfigError without peft."""
    try:
        import peft
    except ImportError:
        raise ConfigError(f"lora: peft is not installed; {install('peft')}") from None
    values: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return peft.LoraConfig(**values, target_modules=lora.target_modules, task_type="CAUSAL_LM")


def build_meta_model(source: str | Path) -> Any:
    """Return the causal LM on the meta device: names, shapes and ties without weights. Draws no random number.

    Raises ConfigError as `load_causal_lm` does.
    """
    return _on_meta(load_model_config(source))


def _on_meta(config: Any) -> Any:
    with _LOADING, torch.random.fork_rng(devices=[]), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def set_generation_config(model: Any, source: str | Path) -> None:
    """Give a model that was made from its config the generation config of its files; many models have none."""
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source)


def require_finite(model: torch.nn.Module, source: str) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ConfigError(f"model: the weights of '{source}' are not finite ({name})")


def _load(auto_class: Any, source: str | Path, what: str, **options: Any) -> Any:
    directory = located(str(source))
    if not Path(directory).is_dir() and not hub_answers(directory):
        options["local_files_only"] = True  # use the cache; the hub's client would retry for a minute
    try:
        with _LOADING:
            return auto_class.from_pretrained(directory, trust_remote_code=False, **options)
    except Exception as error:  # model loaders may raise anything
        if options.get("local_files_only"):
            raise ConfigError(
                f"model: cannot load the {what} of '{source}': no such directory, and the hub cannot be reached, nor "
                "has the model been fetched from it before; correct the path, or see to the network"
            ) from None
        missing = "" if Path(source).is_dir() else " (no such directory, and not found as a hub name)"
        own = isinstance(error, OSError | ValueError | RuntimeError | SafetensorError)
        first = (str(error) if own else f"{type(error).__name__}: {error}").strip() or type(error).__name__
        raise ConfigError(f"model: cannot load the {what} of '{source}'{missing}: {first.splitlines()[0]}") from None
