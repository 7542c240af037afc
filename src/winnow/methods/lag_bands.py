"""Bands of policy lags, for metrics."""

from __future__ import annotations

import numpy as np

LAG_BANDS = {"0": 0, "1": 1, "2": 2, "3-4": 3, "5-8": 5, "9-16": 9, "17_up": 17}
"""Name -> lowest lag, in optimizer steps."""


def band_of(lag_N: np.ndarray) -> np.ndarray:
    """Return the number of each lag's band, int64 [N]."""
    return np.digitize(lag_N, list(LAG_BANDS.values())) - 1
