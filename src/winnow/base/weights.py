"""Weights on their way from the learner to engines."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor, which a receiver must know before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


SLOWEST = 10e6
"""Bytes a second of a link or disk that is slow but works; time limits allow for it."""


def transfer_s(size: int) -> float:
    """Seconds that a time limit allows for so many bytes."""
    return size / SLOWEST


class WeightSource(Protocol):
    """Weights under the names of the Hugging Face model's `state_dict()`, tied ones once, adapters merged, or adapters
    alone (see `adapters_of`); a version is no part of it.

    Valid until the learner's next update.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """All of them, in order; costs nothing."""
        ...

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one after the other, in the order of `specs`; on several ranks a collective."""
        ...

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """For an engine in this process; not copied where that can be avoided, else each made when it is looked up."""
        ...


@runtime_checkable
class RemoteWeights(WeightSource, Protocol):
    """Weights that are in other processes of a Ray cluster, and are finite."""

    def put(self, *, half: bool = False) -> Any:
        """A reference to all of them in Ray's store, `as_bytes`, without a way through this process. `half`: see
        `HalvedWeights`."""
        ...


class StateWeights:
    """A state dict that is in memory anyway."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self._state.items()}

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._state.items()

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self._state


class LazyState(Mapping[str, torch.Tensor]):
    """A state dict whose tensors are made by name each time they are looked up: all of them never exist at once."""

    def __init__(self, names: Collection[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """State-dict names whose tensor the model shares with an earlier name, and that name."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return tied


def state_once(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, with what the model ties only under its first name; engines fill the others in."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A [r, in] and B [out, r] of the LoRA layers in a model, under the names that peft saves them by, without its
    prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    state = model.state_dict().items()
    return {name.replace(".default.", "."): tensor for name, tensor in state if ".lora_" in name}


class FiniteWeights:
    """The weights of another source. Raises FloatingPointError where one is not finite, with its name."""

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
    """Weights for engines that compute in bfloat16: matrices that they round to it anyway travel in half the bytes.

    What an engine may hold in float32 stays as it is: embeddings, norms, biases, routers of experts; and adapters.
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
    """SHA-256 over names, shapes and about a thousand elements of every tensor: cheap, yet no real change escapes."""
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
    """Whether all of its elements are; makes no copy of it."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(torch.stack(tensor.detach().aminmax())).all())


AsBytes = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]]
"""Tensors as bytes, with type and shape: Ray keeps arrays outside of what it pickles, tensors not."""


def as_bytes(tensors: Iterable[tuple[str, torch.Tensor]]) -> AsBytes:
    return {name: (_raw(tensor), tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors}


def _raw(tensor: torch.Tensor) -> np.ndarray:
    raw: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def from_bytes(weights: AsBytes) -> dict[str, torch.Tensor]:
    """Tensors over the same memory; where that is Ray's, they are not to be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they cannot be written to
        return {n: torch.from_numpy(raw).view(dtype).reshape(shape) for n, (raw, dtype, shape) in weights.items()}


Weights = WeightSource | Mapping[str, torch.Tensor]
"""Weights that an engine takes: a source, or a plain state dict from who uses the engine alone."""


def state_of(weights: Weights) -> Mapping[str, torch.Tensor]:
    """All tensors by name."""
    return weights if isinstance(weights, Mapping) else weights.state_dict()


def specs_of(weights: Weights) -> Mapping[str, TensorSpec]:
    """Shape and type of each."""
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
"""Types that are saved, by their names in safetensors, which sorts tensors by type, the last of these first."""


def save_tensors(weights: Weights, file: Path) -> None:
    """Write what `safetensors.torch.save_file` would, byte for byte, with one tensor of a GPU at a time on the host."""
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
