"""Chances of success from scores, and chances of survival from those (ARRoL, section 4 and appendix A.4).

Both come from a `Window`: the last rows of a growing table, read as whole columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from ....base.array_json import Packed, pack
from ....base.state import State

BISECTIONS = 100
INTS, FLOATS, TRUTHS = Packed("i8", None), Packed("f8", None), Packed("?", None)


class Columns:
    """Annotation of a window's state: `Annotated[list[np.ndarray], Columns(INTS, FLOATS)]`; empty without rows."""

    def __init__(self, *columns: Packed) -> None:
        self.columns = columns

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._read)

    def _read(self, value: Any, info: ValidationInfo) -> list[np.ndarray]:
        given = value.get("columns") if isinstance(value, dict) else None
        if not isinstance(given, list) or len(given) not in (0, len(self.columns)):
            raise ValueError(f"is not a window of {len(self.columns)} columns")
        columns = [kind.read(column, info) for kind, column in zip(self.columns, given, strict=False)]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("has columns of different lengths")
        return columns


class Window(deque[tuple[Any, ...]]):
    """Keeps the last `maxlen` rows: numbers, or arrays of a shape that is the same for all rows."""

    def columns(self) -> list[np.ndarray]:
        """Return one array [rows, ...] per column, oldest row first; empty before the first row."""
        return [np.array(column) for column in zip(*self, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"columns": [pack(column) for column in self.columns()]}

    def load(self, columns: list[np.ndarray]) -> None:
        """Load the columns of a state; see `Columns`."""
        self.clear()
        self.extend(zip(*columns, strict=True))


def bin_of(score: float, bins: int) -> int:
    """Return the number of the score's bin of [0, 1]."""
    return min(int(score * bins), bins - 1)


BINS = Packed("i8", None, index="bins")
"""Bins of rows; counting does not check bounds."""


class PosteriorState(State):
    seen: list[Annotated[list[np.ndarray], Columns(BINS, FLOATS)]] = Field(min_length=2, max_length=2)
    labels: Annotated[list[np.ndarray], Columns(TRUTHS, FLOATS)]


class BinnedPosterior:
    """P(success | score) by Bayes' rule over `bins` equal bins of [0, 1] (Zadrozny and Elkan 2001; appendix A.4).

    It keeps the last `capacity` successes and failures each; P(bin | outcome) has Laplace smoothing `alpha`. The prior
    is the share of successes among the last `2 capacity` labels of either kind: two buffers that fill at different
    speeds lose it once the faster one is full. Without labels every posterior is 0.5; with labels of one kind alone it
    is 0 or 1.
    """

    def __init__(self, bins: int = 20, capacity: int = 2048, alpha: float = 1.0) -> None:
        self.bins, self.capacity, self.alpha = bins, capacity, alpha
        self._seen = Window(maxlen=capacity), Window(maxlen=capacity)
        """(bin, weight) of failures and of successes."""
        self._labels = Window(maxlen=2 * capacity)
        """(success, weight)."""

    def observe(self, score: float, label: bool, weight: float = 1.0) -> None:
        """Learn one outcome. `weight`: 1 / (chance that this rollout's outcome was seen)."""
        self._seen[int(label)].append((bin_of(score, self.bins), weight))
        self._labels.append((label, weight))

    @property
    def labels(self) -> tuple[int, int]:
        """Number of failures and successes in memory."""
        return len(self._seen[0]), len(self._seen[1])

    def table(self) -> np.ndarray:
        """Return the posterior of every bin, [bins]."""
        if not len(self._labels):
            return np.full(self.bins, 0.5)
        label_N, weight_N = self._labels.columns()
        joint = [weight_N[label_N == label].sum() * self._likelihood(label) for label in (0, 1)]
        return np.asarray(joint[1] / (joint[0] + joint[1]))

    def _likelihood(self, label: int) -> np.ndarray:
        """Return P(bin | outcome), [bins], with Laplace smoothing."""
        seen = self._seen[label]
        bin_N, weight_N = seen.columns() if len(seen) else (np.empty(0, np.int64), np.empty(0))
        counts_B = np.bincount(bin_N, weight_N, self.bins)
        return np.asarray((counts_B + self.alpha) / (counts_B.sum() + self.alpha * self.bins))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [kind.state_dict() for kind in self._seen], "labels": self._labels.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | PosteriorState) -> None:
        saved = PosteriorState.of(state, bins=self.bins)
        for kind, kept in zip(self._seen, saved.seen, strict=True):
            kind.load(kept)
        self._labels.load(saved.labels)


def survival_probabilities(
    q: ArrayLike,
    buffer_q: ArrayLike,
    keep_rate: float = 0.5,
    target: float = 0.5,
    strength: float = 1.0,
    p_min: float = 0.05,
) -> np.ndarray:
    """Return the chance of survival, float64 [N], for chances of success `q` [N] (equation 2, appendix A.4).

        p = clip(keep_rate + strength * slope * (q - mean) + b, p_min, 1)

    mean and variance are those of `buffer_q` [M], recent rollouts pruned or not. b comes from bisection so that the
    mean of p over them is `keep_rate`, where `p_min` permits. With slope = keep_rate (target - mean) / variance, if
    nothing is clipped and `strength` is 1, the expected share of successes among survivors is `target`, from either
    side. The paper prints slope = -1, which with b solved for lowers the share of successes. An empty buffer, or one
    without variance, gives every rollout the keep rate.
    """
    q_N, buffer_M = np.atleast_1d(np.asarray(q, np.float64)), np.asarray(buffer_q, np.float64).ravel()
    mean, variance = (buffer_M.mean(), buffer_M.var()) if len(buffer_M) else (0.0, 0.0)
    if variance < 1e-12:
        return np.full(len(q_N), max(keep_rate, p_min))
    slope = strength * keep_rate * (target - mean) / variance
    value_U, count_U = np.unique(buffer_M, return_counts=True)
    x_U, share_U, floor = keep_rate + slope * (value_U - mean), count_U / len(buffer_M), max(keep_rate, p_min)
    low, high = p_min - x_U.max(), 1 - x_U.min()
    for _ in range(BISECTIONS):
        b = (low + high) / 2
        low, high = (b, high) if share_U @ np.minimum(np.maximum(x_U + b, p_min), 1) < floor else (low, b)
    return np.clip(keep_rate + slope * (q_N - mean) + high, p_min, 1)


def survival_factor(weights: ArrayLike, keep_rate: float, p_min: float) -> float:
    """Return c such that clip(c w, p_min, 1) has the mean `keep_rate` over positive `weights`, by bisection."""
    w_M, low, high = np.asarray(weights, np.float64), 0.0, 1 / np.min(weights)
    for _ in range(BISECTIONS):
        c = (low + high) / 2
        low, high = (c, high) if np.average(np.clip(c * w_M, p_min, 1)) < keep_rate else (low, c)
    return float(high)
