"""Random numbers keyed by their purpose, never by the time they are drawn.

A noise key names one turn of one rollout: (seed, prompt ordinal, epoch, sibling, turn). The j-th token of that turn
is drawn with number j of `uniform_array`, so batching, placement and restarts do not change it. The mixing function
is SplitMix64's finalizer (Steele, Lea, Flood 2014), which passes BigCrush as a counter-based generator.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

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
        key = mix(key + _GAMMA + _mixed(word))
    return key


@lru_cache(1 << 12)
def _mixed(word: int) -> int:
    """Apply `mix`, cached: numbers of siblings, turns and streams come again and again."""
    return mix(word & _MASK)


def uniform_array(key: int | np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float32 in [0, 1), one per position: multiples of 2**-24, so none rounds to 1.0.

    `key`: one for all positions, or an int64 array with the bits of one key per position.
    """
    x: np.ndarray = np.asarray(key, np.uint64) + (positions.astype(np.uint64) + 1) * _GAMMA
    x = (x ^ (x >> 30)) * _M1
    x = (x ^ (x >> 27)) * _M2
    x = (x ^ (x >> 31)) >> 40
    return x.astype(np.float32) * np.float32(2.0**-24)
