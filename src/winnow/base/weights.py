"""Weights in transfer from the learner to engines."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, needed by a receiver in advance."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


SLOWEST = 10e6
"""Bytes a second of the slowest usable link or disk, assumed by timeouts."""


def transfer_s(size: int) -> float:
    """Return the seconds a timeout allows for `size` bytes."""
    return size / SLOWEST


class WeightSource(Protocol):
    """Weights under the names of the Hugging Face model's `state_dict()`, tied ones once, adapters merged, or adapters
    alone (see `adapters_of`), without a version.

    Valid until the learner's next update.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Return all specs in order; costs nothing."""
        ...

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors one by one in the order of `specs`; a collective on several ranks."""
        ...

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return a state dict for an engine in this process, without copies if possible, else each made on lookup."""
        ...


@runtime_checkable
class RemoteWeights(WeightSource, Protocol):
    """Finite weights in other processes of a Ray cluster."""

    def put(self, *, half: bool = False) -> Any:
        """Return a reference to all of them in Ray's store, `as_bytes`, bypassing this process. `half`: see
        `HalvedWeights`."""
        ...


class StateWeights:
    """A state dict already in memory."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self._state.items()}

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._state.items()

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self._state


class LazyState(UserDict[str, torch.Tensor]):
    """A state dict that makes each tensor on lookup: all of them never exist at once."""

    def __init__(self, names: Collection[str], make: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self.data = dict.fromkeys(names)  # type: ignore[assignment]
        self._make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.data:
            raise KeyError(name)
        return self._make(name)


_OF_MEDIA = re.compile("image|video|audio|vision", re.IGNORECASE)


def without_embedding(model: Any, tokenizer: Any) -> tuple[int, dict[int, str]]:
    """Return the model's number of embeddings, and the tokenizer's tokens beyond them by id.

    None of these can be read or sampled. Tokens of pictures and sounds are left out, as no text has them.
    """
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    sizes = [getattr(end, "num_embeddings", None) or getattr(end, "out_features", None) for end in ends]
    rows = min(size or len(end.weight) for size, end in zip(sizes, ends, strict=True))
    vocabulary = tokenizer.get_vocab().items()
    return rows, {i: token for token, i in vocabulary if i >= rows and not _OF_MEDIA.search(token)}


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return state-dict names whose tensor the model shares with an earlier name -> that name."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return tied


def state_once(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with tied tensors only under their first name; engines fill in the others."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return A [r, in] and B [out, r] of the LoRA layers in a model, under peft's names for saved adapters, without its
    prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    state = model.state_dict().items()
    return {name.replace(".default.", "."): tensor for name, tensor in state if ".lora_" in name}


class FiniteWeights:
    """Weights of another source, checked. Raises FloatingPointError with the name of one that is not finite."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._source.specs

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source.items():
            require_finite(name, tensor)
            yield name, tensor

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        state = self._source.state_dict()
        for name, tensor in state.items():
            require_finite(name, tensor)
        return state


class HalvedWeights:
    """Weights for engines that compute in bfloat16: matrices they would round to it anyway transfer in half the bytes.

    Tensors that an engine may hold in float32 are unchanged: embeddings, norms, biases, routers of experts, adapters.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(spec.shape, _halved(name, spec)) for name, spec in self.source.specs.items()}

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        specs = self.specs
        for name, tensor in self.source.items():
            yield name, tensor.detach().to(specs[name].dtype)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return dict(self.items())


def _halved(name: str, spec: TensorSpec) -> torch.dtype:
    whole = len(spec.shape) < 2 or spec.dtype != torch.float32 or re.search(r"embed|\.gate\.|router|\.lora_", name)
    return spec.dtype if whole else torch.bfloat16


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over names, shapes and about a thousand elements a tensor: cheap, yet detects real changes."""
    sha = hashlib.sha256()
    for name, tensor in state.items():
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 1024)].float().cpu().numpy()
        sha.update(f"{name}{tuple(tensor.shape)}".encode() + some.tobytes())
    return sha.hexdigest()


def require_finite(name: str, tensor: torch.Tensor) -> None:
    if not is_finite(tensor):
        raise FloatingPointError(
            f"the learner's weight {name!r} is not finite; it was not published, and nothing was saved since the last "
            "checkpoint"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite, without a copy of the tensor."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(tensor.detach().aminmax())).all())


AsBytes = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]]
"""Tensors as bytes, dtype and shape: Ray keeps arrays out of its pickles, but not tensors."""


def as_bytes(tensors: Iterable[tuple[str, torch.Tensor]]) -> AsBytes:
    return {name: (_raw(tensor), tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors}


def _raw(tensor: torch.Tensor) -> np.ndarray:
    raw: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def from_bytes(weights: AsBytes) -> dict[str, torch.Tensor]:
    """Return tensors over the same memory; they are read-only if it is Ray's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the tensors are read-only
        return {n: torch.from_numpy(raw).view(dtype).reshape(shape) for n, (raw, dtype, shape) in weights.items()}


Weights = WeightSource | Mapping[str, torch.Tensor]
"""Weights that an engine takes: a source, or a plain state dict where an engine is used without a learner."""


def state_of(weights: Weights) -> Mapping[str, torch.Tensor]:
    """Return all tensors by name."""
    return weights if isinstance(weights, Mapping) else weights.state_dict()


def specs_of(weights: Weights) -> Mapping[str, TensorSpec]:
    """Return the shape and dtype of each tensor."""
    return (StateWeights(weights) if isinstance(weights, Mapping) else weights).specs


KINDS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Dtypes that can be saved -> names in safetensors, which sorts tensors by dtype, the last of these first."""


def save_tensors(weights: Weights, file: Path) -> None:
    """Write the bytes of `safetensors.torch.save_file`, with at most one GPU tensor at a time on the host."""
    order = list(KINDS)
    header: dict[str, Any] = {}
    end = 0
    for name, spec in sorted(specs_of(weights).items(), key=lambda item: (-order.index(item[1].dtype), item[0])):
        offsets = [end, end := end + spec.bytes]
        header[name] = {"dtype": KINDS[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in weights.items():
            opened.seek(8 + len(text) + header[name]["data_offsets"][0])
            opened.write(_raw(tensor).data)
