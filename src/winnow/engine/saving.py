"""Dtypes of saved models: those of the given model, or of `save_dtype`."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..base.errors import ConfigError
from ..base.weights import state_once
from ..config.options import SaveDtype
from .loading import load_model_config, whole_under
from .pretrained import file_of

Types = Mapping[str, SaveDtype]
"""Dtypes by tensor name or name pattern; an exact name wins, then the last pattern. Empty: dtypes unchanged."""
DTYPES_IN_FILES: Mapping[str, SaveDtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}
"""By safetensors' names."""
SAVE_DTYPES: Mapping[torch.dtype, SaveDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float32",
}


def types_of(source: str | Path) -> dict[str, SaveDtype]:
    """Return the dtypes of a model's files (an adapter's base); empty if damaged, which loading reports."""
    config = file_of(whole_under(source), "config.json")
    types: dict[str, SaveDtype] = {}
    files = sorted(config.parent.glob("*.safetensors")) if config else []
    if config is not None and not files:  # of a hub, whose weights are fetched later
        described = load_model_config(source)
        kind = SAVE_DTYPES.get(described.get_text_config().dtype or described.dtype)
        return {"*": kind} if kind else {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                kinds = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}
        types |= {name: DTYPES_IN_FILES[kind] for name, kind in kinds.items() if kind in DTYPES_IN_FILES}
    return brief(types)


def types_in(model: torch.nn.Module) -> dict[str, SaveDtype]:
    """Return the dtypes of a loaded model's parameters and buffers."""
    return brief(types_by_name(state_once(model)))


def types_by_name(state: Mapping[str, torch.Tensor]) -> dict[str, SaveDtype]:
    return {name: SAVE_DTYPES[tensor.dtype] for name, tensor in state.items() if tensor.dtype in SAVE_DTYPES}


def brief(types: Types) -> dict[str, SaveDtype]:
    """Return the same dtypes with the most frequent one as `*`."""
    if not types:
        return {}
    most = Counter(types.values()).most_common(1)[0][0]
    return {"*": most} | {name: kind for name, kind in types.items() if kind != most}


def types_from(key: str | Types) -> Types:
    """Return the dtypes for a value of `save_dtype`."""
    return key if isinstance(key, Mapping) else {} if key == "auto" else {"*": key}  # type: ignore[dict-item]


def in_types(state: Mapping[str, torch.Tensor], types: Types) -> dict[str, torch.Tensor]:
    """Return the state on the host, floating-point tensors in their save dtypes. Raises ConfigError if a number does
    not fit float16."""
    return {name: _typed(name, tensor, types).cpu() for name, tensor in state.items()}


def _typed(name: str, tensor: torch.Tensor, types: Types) -> torch.Tensor:
    matching = [kind for pattern, kind in types.items() if fnmatchcase(name, pattern)]
    kind = types.get(name) or (matching[-1] if matching else None)
    if kind is None or not tensor.is_floating_point():
        return tensor
    typed = tensor.to(getattr(torch, kind))
    if kind == "float16" and bool(typed.isinf().any()):
        raise ConfigError(
            f"save_dtype: float16 cannot hold {name} (up to {float(tensor.abs().max()):.3g}); a resume may change it, "
            "e.g. save_dtype=bfloat16"
        )
    return typed


def save_whole(model: Any, directory: Path, state: Mapping[str, torch.Tensor], types: Types) -> None:
    """Write `state` as the weights of a Hugging Face model."""
    model.save_pretrained(directory, state_dict=in_types(state, types))
    _set_dtype(directory, types)


def recast(source: Path, target: Path, types: Types) -> None:
    """Copy a model's or adapter's directory, with weights in other dtypes."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    total = 0
    for file in sorted(source.glob("*.safetensors")):
        state = in_types(load_file(file), types)
        save_file(state, target / file.name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in state.values())
    index = target / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content.setdefault("metadata", {})["total_size"] = total
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _set_dtype(target, types)


def _set_dtype(directory: Path, types: Types) -> None:
    """Set config.json's dtype to that of most weights; transformers writes the in-memory dtype."""
    file = directory / "config.json"
    if "*" not in types or not file.exists():
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    for part in parts:
        if "dtype" in part:
            part["dtype"] = types["*"]
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
