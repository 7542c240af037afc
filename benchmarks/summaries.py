"""Intervals over seeds from what the JSON files keep of each run: a few arms can be run again beside the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import claims_figures as f
import numpy as np
from claims_figures import Interval

from winnow.study.compare import reached_at
from winnow.study.compare_data import Point

Summary = dict[str, Any]
"""One run; has its `seed`."""
Figures = dict[str, list[Summary]]
"""Arm -> its runs."""


def merged(old: Mapping[str, list[Summary]], new: Mapping[str, list[Summary]], arms: Sequence[str]) -> Figures:
    """Arms and seeds that were not run again keep their figures."""
    found: dict[str, list[Summary]] = {}
    for arm in arms:
        by_seed = {run["seed"]: run for runs in (old, new) for run in runs.get(arm, [])}
        if by_seed:
            found[arm] = [by_seed[seed] for seed in sorted(by_seed)]
    return found


def over_seeds(found: Sequence[Summary], value: Callable[[Summary], float | None]) -> Interval | None:
    """Of the runs that have it."""
    return f.interval([v for run in found if (v := value(run)) is not None])


def paired(found: Sequence[Summary], base: Sequence[Summary]) -> list[tuple[Summary, Summary]]:
    """By seed."""
    by_seed = {run["seed"]: run for run in base}
    return [(run, by_seed[run["seed"]]) for run in found if run["seed"] in by_seed]


def difference(found: Sequence[Summary], base: Sequence[Summary], value: Callable[[Summary], float]) -> Interval | None:
    return f.interval([value(a) - value(b) for a, b in paired(found, base)])


def ratio(found: Sequence[Summary], base: Sequence[Summary], value: Callable[[Summary], float]) -> Interval | None:
    return f.ratio([(value(a), value(b)) for a, b in paired(found, base)])


def passed(run: Summary) -> float:
    """Held-out pass@1 at the end, on all held-out prompts."""
    return float(run["deployed"]["pass@1"])


def points(curve: Sequence[Sequence[float]]) -> list[Point]:
    """Evaluations as `winnow compare` has them."""
    return [Point(int(step), tokens, rollouts, passed) for step, tokens, rollouts, passed in curve]


def to_level(
    found: Sequence[Summary], base: Sequence[Summary], goal: Sequence[Summary], share: float, axis: str
) -> tuple[Interval | None, int, int]:
    """Cost of `found` over that of `base` to `share` of goal's final pass@1; pairs that both reached it; pairs."""
    of_base, of_goal = ({run["seed"]: run for run in runs} for runs in (base, goal))
    pairs, n = [], 0
    for run in found:
        if (seed := run["seed"]) in of_base and seed in of_goal:
            n += 1
            level = share * of_goal[seed]["curve"][-1][3]
            costs = [
                reached_at(points(r["curve"]), level, lambda p: float(getattr(p, axis))) for r in (run, of_base[seed])
            ]
            if costs[0] and costs[1]:
                pairs.append((costs[0], costs[1]))
    return f.ratio(pairs), len(pairs), n


def mean_curve(found: Sequence[Summary]) -> np.ndarray:
    """[evaluations, (step, tokens, rollouts, pass@1)], means over seeds."""
    curves: np.ndarray = np.mean([run["curve"] for run in found], axis=0)
    return curves
