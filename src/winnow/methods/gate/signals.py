"""Disagreement of a group's trajectories after K environment steps: seven numbers in [0, 1].

Zhai and Wang 2026, appendix B. A trajectory that ended before step K is padded with its own kind of END, as in the
authors' code (the prose omits it). Actions and observations are compared as exact strings. All but
`termination_fraction` are smallest when every trajectory is the same. `table_rows` records them for `winnow gate`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, pairwise
from statistics import pvariance
from typing import Any, Final, TypeVar

from rapidfuzz.distance import Levenshtein

from ...types import Fate, Group, GroupKind, Rollout, Turn
from ..group_kind import BY_REWARDS, GroupJudge

Strings = Sequence[Sequence[str]]
Signal = Callable[[Strings, Strings, int], float]
"""`f(actions, observations, k)`.

`actions[i]`: the actions of trajectory i so far, in order; longer than k is cut to k. `observations[i][t]`: the
environment's answer to `actions[i][t]`. Raises ValueError without a trajectory, on k < 1, and when a trajectory's
actions and observations differ in number.
"""

T = TypeVar("T", bound=Hashable)

END: Final = None
"""Padding for every step that a trajectory did not take; equal to no string."""


def prefix_edit_distance(actions: Strings, observations: Strings, k: int) -> float:
    """Return the Levenshtein distance between the first k actions, over whole actions, divided by k; mean over pairs.

    0 when all are the same, or for a single trajectory.
    """
    _check(actions, observations, k)
    prefixes = [_padded(t, k) for t in actions]
    codes = {a: chr(i) for i, a in enumerate({a for p in prefixes for a in p})}  # exact, unlike hashes
    counts = Counter("".join([codes[a] for a in p]) for p in prefixes)
    return _mean_of_pairs(counts, Levenshtein.distance, k)


def action_bigram_jaccard(actions: Strings, observations: Strings, k: int) -> float:
    """Return 1 - |A & B| / |A | B| of the sets of consecutive pairs among the first k actions; mean over pairs.

    0 when all are the same, for a single trajectory, and at k = 1, where no pairs of actions exist.
    """
    _check(actions, observations, k)
    bigrams = [set(pairwise(_padded(t, k))) for t in actions]
    bits = {b: 1 << i for i, b in enumerate(set().union(*bigrams))}  # sets as integers: fast to compare
    counts = Counter(sum(bits[b] for b in own) for own in bigrams)
    unit = math.lcm(*((a | b).bit_count() for a, b in combinations(counts, 2)))
    return _mean_of_pairs(counts, lambda a, b: (a ^ b).bit_count() * (unit // (a | b).bit_count()), unit)


def unique_prefix_ratio(actions: Strings, observations: Strings, k: int) -> float:
    """Return distinct sequences of the first k actions / number of trajectories: 1/G when all are the same."""
    _check(actions, observations, k)
    return _distinct(tuple(_padded(t, k)) for t in actions)


def unique_action_ratio(actions: Strings, observations: Strings, k: int) -> float:
    """Return distinct actions at step k / number of trajectories; END counts as one."""
    _check(actions, observations, k)
    return _distinct(_at(t, k) for t in actions)


def action_entropy(actions: Strings, observations: Strings, k: int) -> float:
    """Return the Shannon entropy of the actions at step k, in bits, divided by log2 G; 0 for a single trajectory."""
    _check(actions, observations, k)
    g = len(actions)
    counts = Counter(_at(t, k) for t in actions).values()
    if len(counts) == 1:
        return 0.0
    return min(1.0, math.fsum(n / g * math.log2(g / n) for n in counts) / math.log2(g))


def obs_unique_ratio(actions: Strings, observations: Strings, k: int) -> float:
    """Return distinct observations before action k / number of trajectories; END if action k was not taken.

    At k = 1 that is the observation of the reset, which a group shares.
    """
    _check(actions, observations, k)
    return _distinct(
        END if len(a) < k else ("",) if k == 1 else (o[k - 2],) for a, o in zip(actions, observations, strict=True)
    )


def termination_fraction(actions: Strings, observations: Strings, k: int) -> float:
    """Return the share of trajectories with fewer than k actions; one that ended with action k does not count.

    Meant for when every trajectory has taken k steps or ended: those with fewer have ended.
    """
    _check(actions, observations, k)
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
TERMINATION: Final = termination_fraction.__name__
"""Not a divergence: a gate's `termination` limits it."""


def _check(actions: Strings, observations: Strings, k: int) -> None:
    if k < 1:
        raise ValueError(f"k counts environment steps from 1, not {k}")
    if not actions:
        raise ValueError("a signal needs at least one trajectory")
    if [len(a) for a in actions] != [len(o) for o in observations]:
        raise ValueError("every trajectory needs as many observations as actions, each the answer to its action")


def _padded(trajectory: Sequence[str], k: int) -> list[str | None]:
    taken = list(trajectory[:k])
    return [*taken, *[END] * (k - len(taken))]


def _at(trajectory: Sequence[str], k: int) -> str | None:
    return trajectory[k - 1] if len(trajectory) >= k else END


def _distinct(things: Iterable[Hashable]) -> float:
    every = list(things)
    return len(set(every)) / len(every)


def _mean_of_pairs(counts: Counter[T], distance: Callable[[T, T], int], unit: int) -> float:
    """Return the mean over all pairs of `distance` / `unit` (0 for equal things; `counts` of each); 0 without pairs.

    Rounded once, so that groups with equal means are ties in every rank.
    """
    n = counts.total()
    pairs = combinations(counts.items(), 2)
    return sum(m * w * distance(a, b) for (a, m), (b, w) in pairs) / max(n * (n - 1) // 2 * unit, 1)


def table_rows(group: Group, steps: Sequence[int], judge: GroupJudge = BY_REWARDS) -> list[dict[str, Any]]:
    """Return the rows of one finished group for `winnow gate`: one for each of `steps`.

    The group must have run to its end: under no gate, or under gates of whole groups whose cuts are audited. Then it
    represents `weight` = 1 / (its chance to get this far) groups. A sibling that was pruned or failed is absent: from
    rewards and steps altogether, and from the signals at step k unless it had taken k steps by then, as a gate in the
    run saw it. `reward_var` is 0 where `judge`, the run's, sees no signal. Raises ValueError when another member has no
    reward, when fewer than two have one, or when members had unequal chances, which leaves the group's own unknown.
    """
    members, visit = group.siblings, f"visit {group.visit.number}"
    ended = [r for r in members if r.reward is not None]
    if any(r.reward is None and r.fate not in (Fate.PRUNED, Fate.FAILED) for r in members):
        raise ValueError(f"{visit}: a member has no reward (its group was stopped), so it tells nothing")
    if len(ended) < 2:
        raise ValueError(f"{visit}: fewer than two members have a reward, so it tells nothing")
    chances = {r.survival_p for r in members}
    if len(chances) > 1:
        raise ValueError(f"{visit}: its members had unlike chances to come to their end")
    rewards = [float(r.reward) for r in ended if r.reward is not None]
    taken = [len(_steps(r)) for r in ended]
    shared = {
        "task_id": f"{group.prompt.id}/{group.visit.epoch}",
        "task_type": str(group.prompt.columns.get("task_type", "")),
        "reward_var": pvariance(rewards) if judge.kind(group) is GroupKind.SIGNAL else 0.0,  # exact: ranked with ties
        "steps": sum(taken),
        "weight": 1 / chances.pop(),
    }
    rows = []
    for k in steps:
        seen = [_steps(r) for r in members if r.reward is not None or len(_steps(r)) >= k]
        actions = [[t.compared for t in steps] for steps in seen]
        observations = [[t.observation or "" for t in steps] for steps in seen]
        signals = {name: f(actions, observations, k) for name, f in SIGNALS.items()}
        rows.append({"K": k, **shared, "steps_k": sum(min(n, k) for n in taken)} | signals)
    return rows


def _steps(rollout: Rollout) -> list[Turn]:
    return [turn for turn in rollout.turns if turn.taken]
