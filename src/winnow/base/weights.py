"""Weights on their way from the learner to engines."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
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

    def put(self) -> Any:
        """A reference to all of them in Ray's store, `as_bytes`, without a way through this process."""
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


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names, shapes and about a thousand elements of every tensor: cheap, yet no real change escapes."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
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
    whole = ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors)
    return {n: (t.reshape(-1).view(torch.uint8).numpy(), t.dtype, tuple(t.shape)) for n, t in whole}


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
