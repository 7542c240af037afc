"""Averaged weights, evaluated in place of the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback


class Averaging(TrainerCallback):
    """Averages the weights of a run, exponentially over its steps; nothing else of the run sees the average.

    `span`: in place of a fixed decay the newest of n steps counts span / (n + span), so that the window grows with the
    run, as in power-function averages (Karras et al. 2024, arXiv 2312.02696).
    """

    def __init__(self, decay: float, span: float = 0.0) -> None:
        self.decay, self.span = decay, span
        self.model: Any = None
        self.averages: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.model = model
        newest = self.span / (state.global_step + self.span) if self.span else 1 - self.decay
        for name, tensor in model.state_dict().items():
            if name in self.averages:
                self.averages[name].lerp_(tensor, newest)
            else:
                self.averages[name] = tensor.clone()

    def saving(self, save: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that saves the average in place of the last weights."""

        def save_average(directory: str) -> None:
            weights = self.model.state_dict()
            last = {name: tensor.clone() for name, tensor in weights.items()}
            for name, tensor in weights.items():
                tensor.copy_(self.averages[name])
            save(directory)
            for name, tensor in weights.items():
                tensor.copy_(last[name])

        return save_average
