"""Builds the policy and its engine: weights are loaded here and nowhere before; LoRA adapters are added, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..base.weights import is_finite, weights_digest
from ..config import ConfigError, LoraConfig, RunConfig, name_of
from ..engine.base import Engine
from ..engine.facts import end_where_rollouts_do
from ..engine.loading import CPU, ModelReference, load_tokenizer, load_whole, peft_config, require_finite
from ..engine.lora import TRAINED, Adapter, with_adapter
from ..engine.pretrained import located
from ..engine.skeleton import as_zeros, in_files, unloaded
from ..engine.template import with_template
from ..learner import Policy
from ..learner.local.reference import frozen_copy
from .initial_model import require_embeddings
from .resolved import Resolved

ADAPTERS = "adapter_model.safetensors"
PLAINLY = frozenset({"r", "lora_alpha", "lora_dropout", "target_modules"})
"""Adapter settings that an engine applies by itself."""


def build_policy(
    r: Resolved, tokenizer: Any = None, checkpoint: Path | None = None, *, with_engine: bool = True
) -> tuple[Policy, Engine | None]:
    """Build the policy of a fresh run or of `checkpoint` on the CPU, and an engine with its weights as version 0.

    `tokenizer`: an object, or None to load it. The engine is built before adapters are added: it holds the plain
    architecture, and loads merged weights or adds adapters itself.
    """
    c, start = r.config, r.model
    if start.model is not None and tokenizer is None:
        raise ConfigError("processing_class: missing; give the tokenizer of the model object")
    tokenizer = with_template(tokenizer or load_tokenizer(c.model), c.chat_template, c.chat_template_kwargs)
    saved = checkpoint / "model" if checkpoint else None
    check_adapters(r)
    read = _read_by_ranks(r, saved, tokenizer) if r.options.learns_elsewhere else None
    if read is not None and not with_engine:
        return read, None
    base, adapter = (load_whole(saved, CPU), None) if saved and not c.lora else start.load()
    require_finite(base, str(saved or c.model))
    require_embeddings(base, tokenizer, start.source, start.adapter)
    end_where_rollouts_do(base, tokenizer)
    engine = build_engine(r.engine, c, start.reference(c.device, base), tokenizer) if with_engine else None
    if read is not None:
        return read, engine
    if c.lora is not None:
        return with_lora(base, c, adapter, saved, tokenizer), engine
    if not c.keeps_reference:
        return Policy(base, tokenizer, None), engine
    reference = frozen_copy(base if saved is None else start.load()[0])
    return Policy(base, tokenizer, reference, weights_digest(reference.state_dict())), engine


def _read_by_ranks(r: Resolved, saved: Path | None, tokenizer: Any) -> Policy | None:
    """Return the policy without base weights if ranks can read these from files, else None. That takes a directory, no
    adapter to train further, and no method that runs the whole model."""
    c, start, (advantage,) = r.config, r.model, r.options.methods["advantage"]
    first = Path(located(c.model))
    folder = first if saved is None or c.lora is not None else saved
    needs_model = getattr(advantage, "weighing", None) == "gradient"
    if needs_model or start.model is not None or (start.adapter is not None and (folder != saved or c.keeps_reference)):
        return None
    model = unloaded(folder) if folder.is_dir() else None
    if model is None:
        return None
    require_embeddings(model, tokenizer, start.source, start.adapter)
    end_where_rollouts_do(model, tokenizer)
    policy = Policy(model, tokenizer, None, files=folder.absolute())
    if c.lora is None and not c.keeps_reference:
        return policy
    origin = unloaded(first) if first.is_dir() else None
    if origin is None:
        return None
    digest = weights_digest(in_files(origin, first))
    if c.lora is None:
        return replace(policy, reference_files=first.absolute(), origin=digest)
    with as_zeros(model):
        adapted = with_lora(model, c, None, saved, tokenizer).model
    return replace(policy, model=adapted, origin=digest)


def build_engine(engine: Any, c: RunConfig, model: ModelReference, tokenizer: Any) -> Engine:
    """Build an engine from its options for a run. Raises ConfigError if it cannot run the model or adapters."""
    adapters = c.lora if c.lora is not None and not c.lora.merge else None
    built: Engine = engine.build(replace(model, adapters=adapters), tokenizer)
    return built


# ---------------------------------------------------------------- adapters


def check_adapters(r: Resolved) -> None:
    """Raise ConfigError when adapters are published alone to an engine that cannot apply them."""
    c, adapter = r.config, r.model.adapter if r.model.resume else None
    if c.lora is None or c.lora.merge:
        return
    if "adapters" not in getattr(r.engine, "provides", ()):
        raise ConfigError(
            f"lora: merge: false publishes adapters alone, and engine: {name_of(c.engine)} takes whole weights; set "
            "lora.merge: true, or engine: vllm"
        )
    special = sorted(key for key in TRAINED - PLAINLY if adapter is not None and adapter.settings.get(key))
    if special:
        raise ConfigError(
            f"lora: merge: false publishes adapters alone, and this one has {special[0]} (adapter_config.json), which "
            "the engine would not apply; set lora.merge: true"
        )


def with_lora(base: Any, c: RunConfig, adapter: Adapter | None, saved: Path | None, tokenizer: Any) -> Policy:
    """Return the policy over `base` with a fresh adapter, or with `adapter`, which is trained further.

    `saved`: directory of trained adapter weights; settings come from `lora` and `adapter`. A fresh adapter's reference
    is the model without it; that of `adapter` is a frozen copy of both. Raises ConfigError on layers that are missing
    or cannot have adapters, and on saved adapters of another kind.
    """
    assert c.lora is not None
    reference, tied = None, base.get_input_embeddings().weight
    if adapter is None:
        origin = weights_digest(base.state_dict())
        options = peft_config(c.lora)
        import peft

        model = peft.get_peft_model(base, options)
    else:
        adapter.require_trainable(adapter.read())
        model = with_adapter(base, adapter, c.lora.dropout or 0.0)
        origin = weights_digest(model.state_dict())
        reference = frozen_copy(model.get_base_model()) if c.keeps_reference else None
    _require_adaptable(base, model, c.lora, tied)
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
