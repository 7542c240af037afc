"""Array operations shared by the advantages, for numpy and torch."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)


def checked(rewards_G: Array) -> Array:
    """Return the rewards as a floating array [n]. Raises ValueError on another shape or an infinite reward."""
    if not isinstance(rewards_G, np.ndarray | torch.Tensor):
        raise TypeError(f"rewards_G must be a numpy array or a torch tensor, not {type(rewards_G).__name__}")
    if rewards_G.ndim != 1:
        raise ValueError(f"rewards_G must have one dimension, not shape {tuple(rewards_G.shape)}")
    if isinstance(rewards_G, torch.Tensor):
        rewards_G = rewards_G if rewards_G.is_floating_point() else rewards_G.double()
        infinite = bool(torch.isinf(rewards_G).any())
    else:
        rewards_G = rewards_G if np.issubdtype(rewards_G.dtype, np.floating) else rewards_G.astype(np.float64)
        infinite = bool(np.isinf(rewards_G).any())
    if infinite:
        raise ValueError(f"rewards must be finite (NaN marks an absent member): {rewards_G}")
    return rewards_G


def present(rewards_G: Array) -> Array:
    """Return the members that have a reward, [n]."""
    return rewards_G[rewards_G == rewards_G]


def no_signal(present_n: Array) -> bool:
    """Whether fewer than two members are present or all are exactly equal: group-relative advantages are then 0."""
    return len(present_n) < 2 or bool(present_n.max() == present_n.min())


def zeros_where_present(rewards_G: Array) -> Array:
    """Return 0 for members with a reward and NaN for absent ones (x - x is exactly that for finite or NaN x)."""
    return rewards_G - rewards_G
