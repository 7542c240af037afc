"""Prototypes of methods that `trials.py` tries; what wins there is built in `src`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from winnow.methods.advantage import Advantage
from winnow.methods.advantage.rloo import rloo


def widest(rewards_n: np.ndarray, m: int) -> np.ndarray:
    """Return which m of n rewards have the largest variance, [n] bool: the lowest and the highest (2504.13818)."""
    order, n = np.argsort(rewards_n, kind="stable"), len(rewards_n)
    ends = [np.r_[order[:low], order[n - (m - low) :]] for low in range(m + 1)]
    best = max(ends, key=lambda some: rewards_n[some].var())
    chosen = np.zeros(n, dtype=bool)
    chosen[best] = True
    return chosen


@dataclass(frozen=True)
class Pods(Advantage):
    """PODS: RLOO's advantages of all rollouts, trained on the share of them with the largest variance of rewards.

    The others get 0, which takes no pass, and those that are kept count for them.
    """

    keep: float = 0.5

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        advantages_G = rloo(rewards_G)
        present = np.flatnonzero(~np.isnan(rewards_G))
        m = max(2, round(self.keep * len(present)))
        if m >= len(present):
            return advantages_G
        dropped = present[~widest(rewards_G[present], m)]
        advantages_G *= len(present) / m
        advantages_G[dropped] = 0.0
        return advantages_G


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
