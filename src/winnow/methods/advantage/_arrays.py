"""Array operations shared by the advantages."""

from __future__ import annotations

import numpy as np


def checked(rewards_G: np.ndarray) -> np.ndarray:
    """Return the rewards as a floating array [n]. Raises ValueError on another shape or an infinite reward."""
    if rewards_G.ndim != 1:
        raise ValueError(f"rewards_G must have one dimension, not shape {rewards_G.shape}")
    if not np.issubdtype(rewards_G.dtype, np.floating):
        rewards_G = rewards_G.astype(np.float64)
    if np.isinf(rewards_G).any():
        raise ValueError(f"rewards must be finite (NaN marks an absent member): {rewards_G}")
    return rewards_G


def present(rewards_G: np.ndarray) -> np.ndarray:
    """Return the members that have a reward, [n]."""
    return rewards_G[~np.isnan(rewards_G)]


def no_signal(present_n: np.ndarray) -> bool:
    """Whether fewer than two members are present or all are exactly equal: group-relative advantages are then 0."""
    return len(present_n) < 2 or bool(present_n.max() == present_n.min())


def zeros_where_present(rewards_G: np.ndarray) -> np.ndarray:
    """Return 0 for members with a reward and NaN for absent ones (x - x is exactly that for finite or NaN x)."""
    return rewards_G - rewards_G
