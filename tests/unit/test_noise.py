"""The counter-based noise: known values, NumPy against Python integers, uniformity, independence of neighbours."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from winnow.base.noise import mix, noise_key, uniform_array

GAMMA = 0x9E3779B97F4A7C15
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
"""First outputs of SplitMix64 from the state 1234567 (the generator's usual test vector)."""
words = st.integers(min_value=0, max_value=2**64 - 1)


def test_mix_is_splitmix64() -> None:
    assert [mix(1234567 + i * GAMMA) for i in range(1, 6)] == PUBLISHED


def signed(keys: list[int]) -> np.ndarray:
    """Return keys as a slot table holds them: int64 of the same bits."""
    return np.array(keys, np.uint64).view(np.int64)


def test_uniform_is_the_top_24_bits_of_splitmix64() -> None:
    got = uniform_array(1234567, np.arange(5))
    assert got.dtype == np.float32
    assert got.tolist() == [(x >> 40) / 2**24 for x in PUBLISHED]


@given(key=words, position=st.integers(min_value=0, max_value=2**31))
def test_uniform_equals_python_integers(key: int, position: int) -> None:
    got = uniform_array(key, np.array([position])).item()
    assert got == (mix(key + (position + 1) * GAMMA) >> 40) / 2**24
    assert got == uniform_array(signed([key]), np.array([position])).item()
    assert 0 <= got < 1


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    keys, positions = [noise_key(3, i) for i in range(50)], np.arange(50) % 7
    whole = uniform_array(signed(keys), positions)
    assert all(uniform_array(keys[i], positions[i : i + 1]).item() == whole[i].item() for i in range(50))


@given(st.lists(st.integers(min_value=-(2**63), max_value=2**64 - 1), min_size=1, max_size=5))
def test_keys_are_64_bit_and_depend_on_every_word_and_their_order(key_words: list[int]) -> None:
    key = noise_key(*key_words)
    assert 0 <= key < 2**64
    assert noise_key(*key_words, 0) != key
    changed = [key_words[0] + 1, *key_words[1:]]
    assert noise_key(*changed) != key
    if key_words != key_words[::-1]:
        assert noise_key(*key_words[::-1]) != key


def test_uniform_over_positions_and_over_keys() -> None:
    n = 100_000
    along = uniform_array(noise_key(0, 1), np.arange(n))
    across = uniform_array(signed([noise_key(0, i) for i in range(n)]), np.zeros(n, dtype=np.int64))
    for sample in (along, across):
        gap = np.abs(np.sort(sample.astype(np.float64)) - (np.arange(n) + 0.5) / n).max()
        assert gap < 2.0 / math.sqrt(n)  # Kolmogorov-Smirnov: 1.95 / sqrt(n) is p = 0.001
    for a, b in ((along[:-1], along[1:]), (across[:-1], across[1:]), (along, across)):
        correlation = abs(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1])
        assert correlation < 4 / math.sqrt(n)
