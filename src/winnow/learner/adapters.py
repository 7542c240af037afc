"""Low-rank adapters on a policy: fresh ones, saved ones, and an adapter that is trained further."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..base.errors import ConfigError
from ..base.weights import is_finite, weights_digest
from ..config.options import LoraConfig
from ..engine.loading import peft_config
from ..engine.lora import Adapter, with_adapter
from .base import Policy
from .local.reference import frozen_copy

ADAPTERS = "adapter_model.safetensors"


def adapted(
    base: Any, lora: LoraConfig, adapter: Adapter | None, saved: Path | None, tokenizer: Any, *, keep_reference: bool
) -> Policy:
    """Return the policy over `base` with a fresh adapter or with `adapter`, which is trained further.

    `saved`: directory of trained adapter weights; settings come from `lora` and `adapter`. A fresh adapter's reference
    is the model without it (None); that of `adapter` is a frozen copy of both, if it is to be kept. Raises ConfigError
    on layers that are missing or cannot have adapters, and on saved adapters of another kind.
    """
    reference, tied = None, base.get_input_embeddings().weight
    if adapter is None:
        origin = weights_digest(base.state_dict())
        options = peft_config(lora)
        import peft

        model = peft.get_peft_model(base, options)
    else:
        adapter.require_trainable(adapter.read())
        model = with_adapter(base, adapter, lora.dropout or 0.0)
        origin = weights_digest(model.state_dict())
        reference = frozen_copy(model.get_base_model()) if keep_reference else None
    _require_adaptable(base, model, lora, tied)
    if saved is not None:
        _load(model, saved / ADAPTERS)
    return Policy(model, tokenizer, reference, origin)


def _require_adaptable(base: Any, model: Any, lora: LoraConfig, tied: Any) -> None:
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for target in lora.target_modules if isinstance(lora.target_modules, list) else []:
        if not any(f".{name}".endswith(f".{target}") for name in adapted):
            raise ConfigError(f"lora: target_modules: the model has no module '{target}'; name one that it has")
    _refuse_fused(base, adapted)
    for name, module in adapted.items():
        if module.get_base_layer().weight is tied:
            raise ConfigError(
                f"lora: target_modules: {name.rpartition('.')[2]} is the embedding, or tied to it, and cannot have an "
                "adapter here; leave it out"
            )


def _load(model: Any, file: Path) -> None:
    import peft

    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    own = peft.get_peft_model_state_dict(model)
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in (own, saved)]
    different = sorted({name for name, _ in kinds[0].items() ^ kinds[1].items()})
    if different:
        raise ConfigError(f"{file}: not the adapters of this configuration; differs in {', '.join(different[:3])}")
    for name, tensor in saved.items():
        if not is_finite(tensor):
            raise ConfigError(f"{file}: {name} is not finite")
    peft.set_peft_model_state_dict(model, saved)


def _refuse_fused(base: Any, adapted: Mapping[str, Any]) -> None:
    fused = [name for name, module in adapted.items() if hasattr(module, "parameter_name")]
    if not fused:  # peft wraps a single tensor of a module this way
        return
    name = next((name for name in fused if "experts" in name), fused[0])
    tensor = f"{name.removesuffix('.base_layer').removeprefix('base_model.model.')}.{adapted[name].parameter_name}"
    layers = dict.fromkeys(name.rpartition(".")[2] for name in adapted if name not in fused)
    raise ConfigError(
        f"lora: target_modules: {type(base).__name__} keeps its experts as single tensors ({tensor}), which "
        f"cannot have adapters here; name its layers, e.g. target_modules: [{', '.join(layers) or 'q_proj'}]"
    )
