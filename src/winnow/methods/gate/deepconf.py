"""Confidence of a trace from windows of its token confidences, with DeepConf's names (Fu et al. 2025, section 3).

`confidence_T`: float [T], T >= 1, one number per token (minus the mean log-probability of its most likely tokens). A
window is `window` tokens in a row, at every offset; a trace of fewer tokens is one window.
"""

from __future__ import annotations

import numpy as np

WINDOW = 2048
BOTTOM = 0.1
"""Share of the windows."""


def window_means(confidence_T: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return the mean of every window, float64 [max(1, T - window + 1)], in order."""
    if len(confidence_T) <= window:
        return np.array([confidence_T.mean()], np.float64)
    sums = np.concatenate([[0.0], np.cumsum(confidence_T, dtype=np.float64)])
    means: np.ndarray = (sums[window:] - sums[:-window]) / window
    return means


def lowest(confidence_T: np.ndarray, window: int = WINDOW) -> float:
    """Return the lowest group confidence: the smallest window mean."""
    return float(window_means(confidence_T, window).min())


def bottom(confidence_T: np.ndarray, window: int = WINDOW) -> float:
    """Return the bottom 10% group confidence: the mean of the lowest tenth of the windows, at least one."""
    means_W = np.sort(window_means(confidence_T, window))
    return float(means_W[: max(1, int(BOTTOM * len(means_W)))].mean())


def tail(confidence_T: np.ndarray, window: int = WINDOW) -> float:
    """Return the tail confidence: the mean of the last `window` tokens."""
    return float(confidence_T[-window:].mean())
