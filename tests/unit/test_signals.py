"""The seven divergence signals: properties, edges, and each against a naive implementation."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.methods.gate.signals import SIGNALS, Strings

END = object()
WORDS = st.sampled_from(["", "a", "b", "go to drawer 1", "é", "END", "None"])
GROUPS = st.lists(st.lists(st.tuples(WORDS, WORDS), max_size=6), min_size=1, max_size=5)
KS = st.integers(1, 7)


def split(group: list[list[tuple[str, str]]]) -> tuple[list[list[str]], list[list[str]]]:
    return [[a for a, _ in t] for t in group], [[o for _, o in t] for t in group]


# Naive versions, written from the definitions and sharing nothing with the module.


def padded(trajectory: Sequence[str], k: int) -> tuple[object, ...]:
    return tuple(trajectory[t] if t < len(trajectory) else END for t in range(k))


def levenshtein(a: tuple[object, ...], b: tuple[object, ...]) -> int:
    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        same = a[i - 1] is b[j - 1] or a[i - 1] == b[j - 1]
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (not same))

    return distance(len(a), len(b))


def naive(name: str, actions: Strings, observations: Strings, k: int) -> float:
    g, prefixes = len(actions), [padded(a, k) for a in actions]
    pairs = list(combinations(prefixes, 2))
    last = [p[-1] for p in prefixes]
    if name == "prefix_edit_distance":
        return sum(levenshtein(a, b) / k for a, b in pairs) / len(pairs) if pairs else 0.0
    if name == "action_bigram_jaccard":
        total = 0.0
        for a, b in pairs:
            x, y = ({(p[t], p[t + 1]) for t in range(k - 1)} for p in (a, b))
            total += 1 - len(x & y) / len(x | y) if x | y else 0.0
        return total / len(pairs) if pairs else 0.0
    if name == "unique_prefix_ratio":
        return len(set(prefixes)) / g
    if name == "unique_action_ratio":
        return len(set(last)) / g
    if name == "action_entropy":
        shares = [last.count(x) / g for x in set(last)]
        return -sum(p * math.log2(p) for p in shares) / math.log2(g) if g > 1 else 0.0
    if name == "obs_unique_ratio":
        seen = [
            END if len(a) < k else ("reset", "") if k == 1 else ("after", o[k - 2])
            for a, o in zip(actions, observations, strict=True)
        ]
        return len(set(seen)) / g
    assert name == "termination_fraction"
    return sum(len(a) <= k - 1 for a in actions) / g


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("name", list(SIGNALS))
@settings(max_examples=200, deadline=None)
@given(group=GROUPS, k=KS)
def test_each_is_what_its_definition_says(name: str, group: list[list[tuple[str, str]]], k: int) -> None:
    actions, observations = split(group)
    value = SIGNALS[name](actions, observations, k)
    assert value == pytest.approx(naive(name, actions, observations, k), abs=1e-12)
    assert 0 <= value <= 1


@pytest.mark.parametrize("name", list(SIGNALS))
@settings(max_examples=60, deadline=None)
@given(group=GROUPS, k=KS, seed=st.integers(0, 99))
def test_the_order_of_trajectories_does_not_matter(
    name: str, group: list[list[tuple[str, str]]], k: int, seed: int
) -> None:
    shuffled = random.Random(seed).sample(group, len(group))
    assert SIGNALS[name](*split(group), k) == SIGNALS[name](*split(shuffled), k)


@settings(max_examples=60, deadline=None)
@given(trajectory=st.lists(st.tuples(WORDS, WORDS), max_size=6), k=KS, g=st.integers(1, 6))
def test_identical_trajectories_have_converged(trajectory: list[tuple[str, str]], k: int, g: int) -> None:
    actions, observations = split([trajectory] * g)
    got = {name: f(actions, observations, k) for name, f in SIGNALS.items()}
    assert got == {
        "prefix_edit_distance": 0.0,
        "action_bigram_jaccard": 0.0,
        "unique_prefix_ratio": 1 / g,
        "unique_action_ratio": 1 / g,
        "action_entropy": 0.0,
        "obs_unique_ratio": 1 / g,
        "termination_fraction": float(len(trajectory) < k),
    }


@settings(max_examples=60, deadline=None)
@given(group=GROUPS, k=KS)
def test_what_happens_after_step_k_does_not_matter(group: list[list[tuple[str, str]]], k: int) -> None:
    cut = [t[:k] for t in group]
    for f in SIGNALS.values():
        assert f(*split(group), k) == f(*split(cut), k)


@settings(max_examples=200, deadline=None)
@given(group=GROUPS, k=KS)
def test_means_over_pairs_are_rounded_once(group: list[list[tuple[str, str]]], k: int) -> None:
    """Groups with equal means are ties in AUROC and rank correlation; a last digit would rank them."""
    actions, observations = split(group)
    padded = [[*t[:k], *[END] * (k - len(t))] for t in actions]
    sets = [set(pairwise(t)) for t in padded]
    distances = [Fraction(len(a ^ b), len(a | b) or 1) for a, b in combinations(sets, 2)]
    exact = sum(distances, Fraction(0)) / max(len(distances), 1)
    assert SIGNALS["action_bigram_jaccard"](actions, observations, k) == float(exact)


def test_by_hand() -> None:
    actions = [["l", "n", "n"], ["l", "n", "s"], ["l"], ["l", "n", "n", "e"]]
    observations = [["1", "2", "3"], ["1", "2", "4"], ["1"], ["1", "9", "3", "5"]]
    got = {name: f(actions, observations, 3) for name, f in SIGNALS.items()}
    # Pairs: (0,1) 1/3, (0,2) 2/3, (0,3) 0, (1,2) 2/3, (1,3) 1/3, (2,3) 2/3; END is an action like any other.
    assert got["prefix_edit_distance"] == pytest.approx(8 / 18)
    assert got["unique_prefix_ratio"] == 3 / 4
    assert got["unique_action_ratio"] == 3 / 4
    assert got["action_entropy"] == pytest.approx(1.5 / 2)
    assert got["obs_unique_ratio"] == 3 / 4, "2, 2, END, 9: what stood there when action 3 was taken"
    assert got["termination_fraction"] == 1 / 4


def test_ending_exactly_at_k_does_not_count_as_ended() -> None:
    actions = [["a"] * 4, ["a"] * 5]
    assert SIGNALS["termination_fraction"](actions, actions, 5) == 0.5
    assert SIGNALS["termination_fraction"](actions, actions, 4) == 0.0


def test_empty_trajectories_and_single_ones() -> None:
    for f in SIGNALS.values():
        assert f([[]], [[]], 3) in (0.0, 1.0)
    assert SIGNALS["prefix_edit_distance"]([[], ["a", "b"]], [[], ["x", "y"]], 2) == 1.0
    assert SIGNALS["unique_action_ratio"]([[], ["END"]], [[], [""]], 1) == 1.0, "no string equals END"


@pytest.mark.parametrize("name", list(SIGNALS))
@pytest.mark.parametrize(
    ("actions", "observations", "k", "message"),
    [
        ([["a"]], [["x"]], 0, "k counts"),
        ([["a"]], [["x"]], -3, "k counts"),
        ([], [], 2, "at least one trajectory"),
        ([["a"]], [[]], 2, "as many observations"),
        ([["a"]], [["x"], ["y"]], 2, "as many observations"),
    ],
)
def test_nonsense_is_refused(name: str, actions: Strings, observations: Strings, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SIGNALS[name](actions, observations, k)
