"""What a learner is: gradients, an optimizer step, weights to publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from ..methods.loss import LossConfig
from .batch import MicroBatch


@dataclass
class Stats:
    """Sums over action tokens of one or more micro-batches; divide by `tokens` for means."""

    sums: dict[str, float] = field(default_factory=dict)
    log_w_B: list[torch.Tensor] = field(default_factory=list)
    """Log importance ratio (learner over sampler) of every row, [B] per micro-batch."""
    log_ratio_N: list[torch.Tensor] = field(default_factory=list)
    """The same of every action token, [N] per micro-batch."""
    baselines: list[torch.Tensor] = field(default_factory=list)
    """Those that the update has found, of pools or of tokens."""
    row_norm_B: list[torch.Tensor] = field(default_factory=list)
    """Gradient norm of every row at an advantage of 1, where baselines depend on it."""

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def mean(self, name: str, of: str = "tokens") -> float:
        return self.sums.get(name, 0.0) / max(self.sums.get(of, 0.0), 1.0)


class Learner(Protocol):
    def forward_backward(self, batch: MicroBatch, loss: LossConfig, stats: Stats) -> None:
        """Accumulate the gradients of one micro-batch. Raises FloatingPointError when the loss is not finite."""
        ...

    def logp(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the tokens after the first, [B, T-1], 0 off the mask, without gradients."""
        ...

    def reference_logp(self, batch: MicroBatch) -> torch.Tensor:
        """The same under the reference model. Raises ValueError without one."""
        ...

    def apply(self, lr: float) -> float:
        """Clip, step the optimizer at this learning rate, clear gradients; returns the norm before clipping.

        Raises FloatingPointError, leaving the weights as they were, when the norm is not finite.
        """
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What the engine loads: names of the Hugging Face model's `state_dict()`, adapters merged."""
        ...

    def save(self, directory: Path) -> None:
        """Write the trained weights (a Hugging Face or PEFT directory) and the optimizer's state."""
        ...

    def load_optimizer(self, directory: Path) -> None: ...
