"""Weights on their way from the learner to engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor, which a receiver must know before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Weights under the names of the Hugging Face model's `state_dict()`, adapters merged; a version is no part of it.

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
        """All at once, for an engine in this process; not copied where that can be avoided."""
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


Weights = WeightSource | Mapping[str, torch.Tensor]
"""Weights that an engine takes: a source, or a plain state dict from who uses the engine alone."""


def state_of(weights: Weights) -> Mapping[str, torch.Tensor]:
    """All tensors by name."""
    return weights if isinstance(weights, Mapping) else weights.state_dict()
