"""Disagreement of a group's trajectories after K environment steps: seven numbers in [0, 1].

Zhai and Wang 2026, appendix B. A trajectory that ended before step K is padded with its own kind of END, as in the
authors' code (the prose omits it). Actions and observations are compared as exact strings. All but
`termination_fraction` are smallest when every trajectory is the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, pairwise
from typing import Final, TypeVar

from rapidfuzz.distance import Levenshtein

Strings = Sequence[Sequence[str]]
Signal = Callable[[Strings, Strings, int], float]
"""`f(actions, observations, k)`.

`actions[i]`: the actions of trajectory i so far, in order; longer than k is cut to k. `observations[i][t]`: the
environment's answer to `actions[i][t]`. At least one trajectory, as many observations as actions, and k from 1 on.
"""

T = TypeVar("T", bound=Hashable)

END: Final = None
"""Padding for every step that a trajectory did not take; equal to no string."""


def prefix_edit_distance(actions: Strings, observations: Strings, k: int) -> float:
    """Return the Levenshtein distance between the first k actions, over whole actions, divided by k; mean over pairs.

    0 when all are the same, or for a single trajectory.
    """
    prefixes = [_padded(t, k) for t in actions]
    codes = {a: chr(i) for i, a in enumerate({a for p in prefixes for a in p})}  # exact, unlike hashes
    counts = Counter("".join([codes[a] for a in p]) for p in prefixes)
    return _mean_of_pairs(counts, Levenshtein.distance, k)


def action_bigram_jaccard(actions: Strings, observations: Strings, k: int) -> float:
    """Return 1 - |A & B| / |A | B| of the sets of consecutive pairs among the first k actions; mean over pairs.

    0 when all are the same, for a single trajectory, and at k = 1, where no pairs of actions exist.
    """
    return _mean_of_pairs(Counter(frozenset(pairwise(_padded(t, k))) for t in actions), _jaccard_distance)


def unique_prefix_ratio(actions: Strings, observations: Strings, k: int) -> float:
    """Return distinct sequences of the first k actions / number of trajectories: 1/G when all are the same."""
    return _distinct(tuple(_padded(t, k)) for t in actions)


def unique_action_ratio(actions: Strings, observations: Strings, k: int) -> float:
    """Return distinct actions at step k / number of trajectories; END counts as one."""
    return _distinct(_at(t, k) for t in actions)


def action_entropy(actions: Strings, observations: Strings, k: int) -> float:
    """Return the Shannon entropy of the actions at step k, in bits, divided by log2 G; 0 for a single trajectory."""
    g = len(actions)
    counts = Counter(_at(t, k) for t in actions).values()
    if len(counts) == 1:
        return 0.0
    return min(1.0, math.fsum(n / g * math.log2(g / n) for n in counts) / math.log2(g))


def obs_unique_ratio(actions: Strings, observations: Strings, k: int) -> float:
    """Return distinct observations before action k / number of trajectories; END if action k was not taken.

    At k = 1 that is the observation of the reset, which a group shares.
    """
    return _distinct(
        END if len(a) < k else ("",) if k == 1 else (o[k - 2],) for a, o in zip(actions, observations, strict=True)
    )


def termination_fraction(actions: Strings, observations: Strings, k: int) -> float:
    """Return the share of trajectories with fewer than k actions; one that ended with action k does not count.

    Meant for when every trajectory has taken k steps or ended: those with fewer have ended.
    """
    return sum(len(t) < k for t in actions) / len(actions)


SIGNALS: dict[str, Signal] = {
    f.__name__: f
    for f in (
        prefix_edit_distance,
        action_bigram_jaccard,
        unique_prefix_ratio,
        unique_action_ratio,
        action_entropy,
        obs_unique_ratio,
        termination_fraction,
    )
}
"""Name -> signal, in the order of the paper's table 7."""


def _padded(trajectory: Sequence[str], k: int) -> list[str | None]:
    taken = list(trajectory[:k])
    return [*taken, *[END] * (k - len(taken))]


def _at(trajectory: Sequence[str], k: int) -> str | None:
    return trajectory[k - 1] if len(trajectory) >= k else END


def _distinct(things: Iterable[Hashable]) -> float:
    every = list(things)
    return len(set(every)) / len(every)


def _jaccard_distance(a: frozenset[T], b: frozenset[T]) -> float:
    return 1 - len(a & b) / len(a | b)


def _mean_of_pairs(counts: Counter[T], distance: Callable[[T, T], float], unit: int = 1) -> float:
    """Return the mean over all pairs of `distance` / `unit` (0 for equal things; `counts` of each); 0 without pairs."""
    n = counts.total()
    pairs = combinations(counts.items(), 2)
    return math.fsum(m * w * distance(a, b) for (a, m), (b, w) in pairs) / max(n * (n - 1) // 2 * unit, 1)
