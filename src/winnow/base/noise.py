"""Random numbers keyed by their purpose, never by the time they are drawn.

A noise key names one turn of one rollout: (seed, prompt ordinal, epoch, sibling, turn). The j-th token of that turn
is drawn with `uniform(key, j)`, so batching, placement and restarts do not change it. The mixing function
is SplitMix64's finalizer (Steele, Lea, Flood 2014), which passes BigCrush as a counter-based generator.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def mix(x: int) -> int:
    """Apply SplitMix64's finalizer to a 64-bit integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


def noise_key(*words: int, key: int = 0) -> int:
    """Return the 64-bit key of integers, e.g. `noise_key(seed, ordinal, epoch, sibling, turn)`.

    `key`: that of the words before these, where many keys begin alike.
    """
    for word in words:
        x = (key + _GAMMA + _mixed(word)) & _MASK  # `mix`, without a call
        x = ((x ^ (x >> 30)) * _M1) & _MASK
        x = ((x ^ (x >> 27)) * _M2) & _MASK
        key = x ^ (x >> 31)
    return key


@lru_cache(1 << 12)
def _mixed(word: int) -> int:
    """Apply `mix`, cached: numbers of siblings, turns and streams come again and again."""
    return mix(word & _MASK)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: Any, n: int) -> Any:
    """Shift int64 right logically (the shift of tensors and arrays is arithmetic)."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def as_tensor(keys: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return int64 [N] of unsigned 64-bit keys."""
    import torch

    return torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=device)


def uniform(keys_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Return float32 [N] in [0, 1), one per (key, position): multiples of 2**-24, so none rounds to 1.0."""
    return _top_bits(keys_N, positions_N).float() * 2.0**-24


def uniform_array(key: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return what `uniform` does for one key, or an int64 key per position, as a float32 array; much faster."""
    keys = _signed(key) if isinstance(key, int) else key
    bits: np.ndarray = _top_bits(keys, positions.astype(np.int64))
    return bits.astype(np.float32) * np.float32(2.0**-24)


def _top_bits(keys: Any, positions: Any) -> Any:
    """Return the top 24 bits of SplitMix64, of int64 tensors or arrays."""
    x = keys + (positions + 1) * _signed(_GAMMA)
    x = (x ^ _shift(x, 30)) * _signed(_M1)
    x = (x ^ _shift(x, 27)) * _signed(_M2)
    x = x ^ _shift(x, 31)
    return _shift(x, 40)
