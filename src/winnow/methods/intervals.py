"""Means over seeds, with Student intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_SEEDS = 3
"""Fewest values for an interval."""
T_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.306, 2.2622, 2.2281),
    *(2.201, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.093, 2.086),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""Quantiles 0.975 of Student's t for 1 to 30 degrees of freedom."""
Z_95 = 1.959963984540054
"""Normal quantile of a two-sided 95% interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `n` values with its 95% interval; no interval below `MIN_SEEDS` values."""

    mean: float
    low: float | None
    high: float | None
    n: int


def mean_interval(values_S: Sequence[float] | np.ndarray) -> Estimate:
    """Return the mean of float64 [S] and its 95% Student interval, which covers normal values 95% of the time at any S.

    For paired differences pass the differences. Raises ValueError on no values, or one that is not finite.
    """
    values_S = np.asarray(values_S, dtype=np.float64)
    if values_S.ndim != 1 or not len(values_S) or not np.isfinite(values_S).all():
        raise ValueError(f"an interval needs a list of finite numbers, got {values_S!r}")
    n, mean = len(values_S), float(values_S.mean())
    if n < MIN_SEEDS:
        return Estimate(mean, None, None, n)
    half = _quantile(n - 1) * float(values_S.std(ddof=1)) / n**0.5
    return Estimate(mean, mean - half, mean + half, n)


def score_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share of `n` yes-or-no values: within [0, 1], and of some width at its ends."""
    z2 = Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * (share * (1 - share) / n + z2 / (4 * n * n)) ** 0.5 / (1 + z2 / n)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _quantile(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t; beyond the table from its expansion, to 1e-4."""
    return T_95[degrees - 1] if degrees <= len(T_95) else student(degrees)


def student(degrees: float) -> float:
    """Return the 0.975 quantile of Student's t, by the first terms of its expansion around the normal; degrees >= 1."""
    z = Z_95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
