"""GRPO: deviation from the group mean in units of the group's standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ._base import Advantage, no_signal, present, zeros_where_present


def grpo(rewards_G: np.ndarray, eps: float = 1e-6, ddof: int = 0) -> np.ndarray:
    """Return (r - mean) / (std + eps) over the n members that have a reward; the variance divides by n - `ddof`.

    [G] -> [G]; NaN members stay NaN. All equal, or fewer than two present: zeros. Raises ValueError on a shape
    other than [G] or an infinite reward. Source: Shao et al. 2024 (DeepSeekMath), outcome supervision.
    """
    there = present(rewards_G)
    if no_signal(there):
        return zeros_where_present(rewards_G)
    mean = there.mean()
    variance = ((there - mean) ** 2).mean() * (len(there) / (len(there) - ddof))
    return (rewards_G - mean) / (variance**0.5 + eps)


@dataclass(frozen=True)
class Grpo(Advantage):
    """GRPO (Shao et al. 2024): (r - mean) / (std + eps).

    The default is the population standard deviation, as in the papers: a group's advantages have mean square 1 at any
    size. TRL's form is `{name: grpo, ddof: 1, eps: 0.0001}`, smaller by sqrt((G - 1) / G).
    """

    eps: float = 1e-6
    ddof: Literal[0, 1] = 0
    """0: variance of the group. 1: sample variance, with Bessel's correction."""
    scaled: ClassVar[bool] = True
    may_vanish: ClassVar[bool] = False

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        return grpo(rewards_G, self.eps, self.ddof)
