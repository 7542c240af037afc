"""RLOO: each reward minus the mean of its siblings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._base import Advantage, no_signal, present, zeros_where_present


def rloo(rewards_G: np.ndarray) -> np.ndarray:
    """Return r_i - mean of the other members that have a reward.

    [G] -> [G]; NaN members stay NaN. All equal, or fewer than two present: zeros. Raises ValueError on a shape
    other than [G] or an infinite reward. Source: Ahmadian et al. 2024, eq. 7.
    """
    there = present(rewards_G)
    if no_signal(there):
        return zeros_where_present(rewards_G)
    n = len(there)
    return (rewards_G - there.mean()) * (n / (n - 1))


@dataclass(frozen=True)
class Rloo(Advantage):
    """RLOO (Ahmadian et al. 2024): r_i - mean of the siblings."""

    may_vanish: ClassVar[bool] = False

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        return rloo(rewards_G)
