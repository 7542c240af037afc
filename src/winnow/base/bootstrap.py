"""Means over seeds, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SEEDS = 3
"""Least number of values for an interval; with fewer there is nothing to resample."""
DRAWS_AT_ONCE = 1_000_000
"""Numbers drawn at a time, so that thousands of values need no gigabytes."""
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `n` values; `low` and `high` bound it with the confidence asked for, or are None below `MIN_SEEDS`."""

    mean: float
    low: float | None
    high: float | None
    n: int


def paired_bootstrap(
    differences_S: Sequence[float] | np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Mean and percentile-bootstrap interval of float64 [S] paired differences, one a seed (Efron 1979).

    Pairs are resampled whole, so what a seed does to both methods cancels. For a plain mean, give the values
    themselves. The resamples are those of `seed` alone: equal input, equal interval. With the few seeds that one can
    afford, percentile intervals are too narrow (on normal data those of 95% cover 76% at S = 3, 84% at S = 5, 89% at
    S = 10); read them as a lower bound on the uncertainty. Raises ValueError on no values, or one that is not finite.
    """
    values_S = np.asarray(differences_S, dtype=np.float64)
    if values_S.ndim != 1 or not len(values_S) or not np.isfinite(values_S).all():
        raise ValueError(f"a bootstrap needs a list of finite numbers, got {differences_S!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    n, mean = len(values_S), float(values_S.mean())
    if n < MIN_SEEDS:
        return Estimate(mean, None, None, n)
    rng, rows = np.random.default_rng(seed), max(1, DRAWS_AT_ONCE // n)
    sizes = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    means_R = np.concatenate([values_S[rng.integers(n, size=(size, n))].mean(axis=1) for size in sizes])
    tail = (1 - confidence) / 2
    low, high = np.quantile(means_R, [tail, 1 - tail])
    return Estimate(mean, float(low), float(high), n)
