"""Array operations shared by the advantages."""

from __future__ import annotations

import numpy as np


def present(rewards_G: np.ndarray) -> np.ndarray:
    """Return the members that have a reward, [n]. Raises ValueError on another shape or an infinite reward."""
    if rewards_G.ndim != 1 or np.isinf(rewards_G).any():
        raise ValueError(f"rewards must be finite, one for each member (NaN: absent), not {rewards_G}")
    return rewards_G[~np.isnan(rewards_G)]


def no_signal(present_n: np.ndarray) -> bool:
    """Whether fewer than two members are present or all are exactly equal: group-relative advantages are then 0."""
    return len(present_n) < 2 or bool(present_n.max() == present_n.min())


def zeros_where_present(rewards_G: np.ndarray) -> np.ndarray:
    """Return 0 for members with a reward and NaN for absent ones (x - x is exactly that for finite or NaN x)."""
    return rewards_G - rewards_G
