"""What a learner is: gradients, an optimizer step, weights to publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..batch import MicroBatch
from ..loss import LossConfig


class Learner(Protocol):
    def forward_backward(self, batch: MicroBatch, loss: LossConfig) -> dict[str, float]:
        """Accumulate gradients of one micro-batch; returns sums for the metrics. Raises FloatingPointError if not finite."""
        ...

    def apply(self, lr: float) -> float:
        """Clip, step the optimizer at this learning rate, clear gradients; returns the gradient norm before clipping."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What the engine loads: names of the Hugging Face model's `state_dict()`, LoRA merged. Finite, or FloatingPointError."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
