"""Intervals over seeds from what the JSON files keep of each run: a few arms can be run again beside the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import claims_figures as f
import numpy as np
from claims_figures import Interval

Summary = dict[str, Any]
"""One run; has its `seed`."""
Figures = dict[str, list[Summary]]
"""Arm -> its runs."""


def merged(old: Mapping[str, list[Summary]], new: Mapping[str, list[Summary]], arms: Sequence[str]) -> Figures:
    """Arms that were not run again keep their figures."""
    found = {**old, **new}
    return {arm: found[arm] for arm in arms if arm in found}


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


def mean_curve(found: Sequence[Summary]) -> np.ndarray:
    """[evaluations, (step, tokens, rollouts, pass@1)], means over seeds."""
    curves: np.ndarray = np.mean([run["curve"] for run in found], axis=0)
    return curves
