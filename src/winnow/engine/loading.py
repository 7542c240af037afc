"""Hugging Face models and tokenizers, from a directory or a hub name to a device."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..base.install import install
from ..config import ConfigError, LoraConfig
from .hub import file_of, hub_answers
from .lora import SETTINGS, Adapter, adapter_at, merged
from .pretrained import located

WEIGHTS = ("*.safetensors", "*.bin")
LEAST_BYTES = 0.1
"""Bytes a parameter at least: quantised weights have 0.25 and more, shared ones are counted once."""
MOST_LAYERS = 2_000
CPU = torch.device("cpu")
_LOADING = threading.Lock()
"""transformers loads one model at a time: in two threads at once it takes tied weights for missing."""


@dataclass(frozen=True)
class ModelReference:
    """Model that an engine is to serve, with its weights as version 0, and where."""

    source: str
    """Directory or hub name of a Hugging Face model, none of our own names; empty where an object was given, which may
    be in neither."""
    device: torch.device
    loaded: Any = None
    """The model, on any device, where this process has it anyway; it stays the caller's."""
    adapters: LoraConfig | None = None
    """What weights to load will be: these alone, for an engine that provides `adapters`. None: whole weights."""

    def load(self) -> Any:
        """The Hugging Face model, read only if nobody has yet, to the CPU: engines copy it to their device in their own
        type. Raises ConfigError as `load_causal_lm` does."""
        return load_causal_lm(self.source, CPU) if self.loaded is None else self.loaded


def quiet_transformers() -> None:
    """Keep transformers' own progress bars out of our display."""
    logging.disable_progress_bar()


def resolve_device(name: str) -> torch.device:
    """The device of this name; `auto` is a GPU if there is one. Raises ConfigError when it cannot be used."""
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
    """Settings of this process for work on a GPU; `deterministic` holds for the rest of it.

    cuDNN's attention builds a plan for every new shape, which takes about a second, and RL batches have new shapes in
    every step. PyTorch prefers it on Hopper and Blackwell; flash and memory-efficient attention need no plans.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first matrix product
        torch.use_deterministic_algorithms(True)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a model, or of an adapter, else that of its base.

    Raises ConfigError when there is none, or when it would need code from the model's repository.
    """
    adapter = adapter_at(source)
    if adapter is not None and file_of(source, "tokenizer_config.json") is None:
        whole_under(source)
        return load_tokenizer(adapter.base)
    return _load(AutoTokenizer, source, "tokenizer")


def load_causal_lm(source: str | Path, device: torch.device) -> Any:
    """A float32 causal LM; an adapter is merged into its base.

    Raises ConfigError when it cannot be loaded without running foreign code, or when its weights are incomplete.
    """
    base, adapter = load_start(source, device)
    return base if adapter is None else merged(base, adapter)


def load_start(source: str | Path, device: torch.device) -> tuple[Any, Adapter | None]:
    """A float32 causal LM, or the base of the adapter that `source` is, and that adapter.

    Raises ConfigError as `load_causal_lm` does.
    """
    adapter = adapter_at(source)
    if adapter is None:
        return load_whole(source, device), None
    whole_under(source)
    return load_causal_lm(adapter.base, device), adapter


def whole_under(source: str | Path) -> str:
    """The model itself, or what lies below all adapters. Raises ConfigError where they go round in a circle."""
    sources = [str(source)]
    while (adapter := adapter_at(sources[-1])) is not None:
        if adapter.base in sources:
            raise ConfigError(
                f"model: {adapter.name}: base_model_name_or_path: is an adapter over this one; correct it"
            )
        sources.append(adapter.base)
    return sources[-1]


def load_whole(source: str | Path, device: torch.device) -> Any:
    """The same of a directory or hub name with whole weights, without an adapter."""
    require_whole(source)
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, info = _load(AutoModelForCausalLM, source, "model", **options)
    if info["missing_keys"]:
        shown = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"model: '{source}' lacks weights, which would start at random: {shown}")
    return model.to(device)


def require_whole(source: str | Path) -> None:
    """Raises ConfigError for an adapter, for weights that are not those of the configuration, and quantized ones."""
    if file_of(source, SETTINGS) is not None:
        raise ConfigError(f"model: '{source}' is an adapter, and a whole model is needed here")
    _require_weights_for(source)
    _refuse_quantized(source)


def _refuse_quantized(source: str | Path) -> None:
    quantized = getattr(load_config(source), "quantization_config", None) or {}
    kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
    if kind not in (None, "mxfp4"):  # transformers de-quantizes that
        raise ConfigError(
            f"model: '{source}' is quantized ({getattr(kind, 'value', kind)}) and cannot be trained; name the model "
            "that it was made from (for an adapter: as base_model_name_or_path in its adapter_config.json)"
        )


def load_config(source: str | Path) -> Any:
    """The configuration of a model, or of what lies below an adapter. Raises ConfigError as `load_causal_lm` does."""
    return _load(AutoConfig, whole_under(source), "model")


def _require_weights_for(source: str | Path) -> None:
    """ConfigError where a directory's configuration describes a far larger model than its files hold.

    transformers would make what is missing at random first, in whatever memory that takes.
    """
    directory = Path(located(str(source)))
    held = sum(file.stat().st_size for pattern in WEIGHTS for file in directory.glob(pattern))
    if not held:
        return
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with _LOADING, torch.device("meta"):
            layers = config.get_text_config().num_hidden_layers
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False) if layers <= MOST_LAYERS else None
    except Exception:  # told by the loader itself, which reads the same files
        return
    wanted = sum(p.numel() for p in model.parameters()) if model is not None else None
    if wanted is None or wanted > held / LEAST_BYTES:
        described = f"{layers} layers" if wanted is None else f"{wanted:,} parameters"
        raise ConfigError(
            f"model: the config.json of '{source}' describes {described}, its weights are {held:,} bytes; restore "
            "the file that belongs to them"
        )


def peft_config(lora: LoraConfig) -> Any:
    """Our options as a peft `LoraConfig`. Raises ConfigError without peft."""
    try:
        import peft
    except ImportError:
        raise ConfigError(f"lora: peft is not installed; {install('peft')}") from None
    values: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return peft.LoraConfig(**values, target_modules=lora.target_modules, task_type="CAUSAL_LM")


def shell_of(source: str | Path) -> Any:
    """The causal LM without weights, on the meta device: its names, shapes and ties. No random number is drawn.

    Raises ConfigError as `load_causal_lm` does.
    """
    config = load_config(source)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def require_finite(model: torch.nn.Module, source: str) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ConfigError(f"model: the weights of '{source}' are not finite ({name})")


def _load(auto_class: Any, source: str | Path, what: str, **options: Any) -> Any:
    directory = located(str(source))
    if not Path(directory).is_dir() and not hub_answers(directory):
        options["local_files_only"] = True  # what was fetched before is used; the hub's client would retry for a minute
    try:
        with _LOADING:
            return auto_class.from_pretrained(directory, trust_remote_code=False, **options)
    except Exception as error:  # a directory may hold anything, and the loaders of models raise anything
        if options.get("local_files_only"):
            raise ConfigError(
                f"model: cannot load the {what} of '{source}': no such directory, and the hub cannot be reached, nor "
                "has the model been fetched from it before; correct the path, or see to the network"
            ) from None
        missing = "" if Path(source).is_dir() else " (no such directory, and not found as a hub name)"
        own = isinstance(error, OSError | ValueError | RuntimeError | SafetensorError)
        first = (str(error) if own else f"{type(error).__name__}: {error}").strip() or type(error).__name__
        raise ConfigError(f"model: cannot load the {what} of '{source}'{missing}: {first.splitlines()[0]}") from None
