"""Advantages: pure functions of one group's rewards, NaN where a member is absent."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .dr_grpo import DrGrpo, dr_grpo
from .grpo import Grpo, grpo
from .rloo import Rloo, rloo


class Advantage(Protocol):
    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        """float64 [G] -> float64 [G]; NaN in, NaN out."""
        ...


ADVANTAGES: dict[str, type] = {"grpo": Grpo, "rloo": Rloo, "dr_grpo": DrGrpo}

__all__ = ["ADVANTAGES", "Advantage", "dr_grpo", "grpo", "rloo"]
