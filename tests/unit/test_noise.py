"""The counter-based noise: known values, Python against torch, uniformity, independence of neighbours."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.base.noise import as_tensor, mix, noise_key, uniform, uniform_array

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


def test_uniform_is_the_top_24_bits_of_splitmix64() -> None:
    got = uniform(as_tensor([1234567] * 5), torch.arange(5))
    assert got.tolist() == [(x >> 40) / 2**24 for x in PUBLISHED]


@given(key=words, position=st.integers(min_value=0, max_value=2**31))
def test_uniform_equals_python_integers(key: int, position: int) -> None:
    got = uniform(as_tensor([key]), torch.tensor([position]))
    assert uniform_array(key, np.array([position]))[0] == got[0]
    assert got.item() == (mix(key + (position + 1) * GAMMA) >> 40) / 2**24
    assert 0 <= got.item() < 1


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    keys, positions = as_tensor([noise_key(3, i) for i in range(50)]), torch.arange(50) % 7
    whole = uniform(keys, positions)
    assert all(uniform(keys[i : i + 1], positions[i : i + 1]).item() == whole[i].item() for i in range(50))


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
    along = uniform(as_tensor([noise_key(0, 1)]).expand(n), torch.arange(n))
    across = uniform(as_tensor([noise_key(0, i) for i in range(n)]), torch.zeros(n, dtype=torch.int64))
    for sample in (along, across):
        x = sample.double().sort().values
        gap = (x - (torch.arange(n) + 0.5) / n).abs().max().item()
        assert gap < 2.0 / math.sqrt(n)  # Kolmogorov-Smirnov: 1.95 / sqrt(n) is p = 0.001
    for a, b in ((along[:-1], along[1:]), (across[:-1], across[1:]), (along, across)):
        correlation = torch.corrcoef(torch.stack([a, b]).double())[0, 1].abs().item()
        assert correlation < 4 / math.sqrt(n)
