"""Averaged weights, evaluated in place of the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback


class Averaging(TrainerCallback):
    """Averages the weights of a run, exponentially over its steps; nothing else of the run sees the average."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.model: Any = None
        self.averages: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.model = model
        for name, tensor in model.state_dict().items():
            if name in self.averages:
                self.averages[name].lerp_(tensor, 1 - self.decay)
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
