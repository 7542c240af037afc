"""From scores to chances of success, and from those to chances of survival (ARRoL, section 4 and appendix A.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

Balance = Literal["target", "literal"]
BISECTIONS = 100


class BinnedPosterior:
    """P(success | score) by Bayes' rule over `bins` equal bins of [0, 1] (Zadrozny and Elkan 2001; appendix A.4).

    The last `capacity` successes and failures each are remembered; P(bin | outcome) has Laplace smoothing `alpha`. The
    prior is the share of successes of the last `2 capacity` labels of either kind: two buffers that fill at different
    speeds cannot tell it once the faster one is full. Without labels every posterior is 0.5; with labels of one kind
    alone it is 0 or 1. Raises ValueError on options out of range.
    """

    def __init__(self, bins: int = 20, capacity: int = 2048, alpha: float = 1.0) -> None:
        if bins < 1 or capacity < 1 or not alpha > 0:
            raise ValueError(f"bins and capacity must be at least 1 and alpha above 0, not {bins}, {capacity}, {alpha}")
        self.bins, self.capacity, self.alpha = bins, capacity, alpha
        self._seen: tuple[deque[tuple[int, float]], ...] = (deque(maxlen=capacity), deque(maxlen=capacity))
        """(bin, weight) of failures and of successes."""
        self._labels: deque[tuple[bool, float]] = deque(maxlen=2 * capacity)
        self._posterior_B: np.ndarray | None = None

    def bin_of(self, score: ArrayLike) -> np.ndarray:
        """Number of the bin, int64 like `score`. Raises ValueError on a score outside [0, 1]."""
        scores = np.asarray(score, dtype=np.float64)
        if not ((scores >= 0) & (scores <= 1)).all():
            raise ValueError(f"scores must lie in [0, 1], not {scores[~((scores >= 0) & (scores <= 1))].flat[0]}")
        return np.minimum((scores * self.bins).astype(np.int64), self.bins - 1)

    def observe(self, score: float, label: bool, weight: float = 1.0) -> None:
        """Learn one outcome. `weight`: 1 / (the chance with which this rollout's outcome came to be seen)."""
        if not (np.isfinite(weight) and weight > 0):
            raise ValueError(f"weight must be a positive number, not {weight}")
        self._seen[bool(label)].append((int(self.bin_of(score)), float(weight)))
        self._labels.append((bool(label), float(weight)))
        self._posterior_B = None

    @property
    def labels(self) -> tuple[int, int]:
        """How many failures and successes are remembered."""
        return len(self._seen[0]), len(self._seen[1])

    def posterior(self, score: ArrayLike) -> Any:
        """Chance of success, float64 of the shape of `score`; a float for a number."""
        found = self.table()[self.bin_of(score)]
        return float(found) if found.ndim == 0 else found

    def table(self) -> np.ndarray:
        """The posterior of every bin, [bins]."""
        if self._posterior_B is None:
            mass = [sum(w for kind, w in self._labels if kind == label) for label in (False, True)]
            joint = [m * self._likelihood(label) for label, m in enumerate(mass)]
            self._posterior_B = joint[1] / (joint[0] + joint[1]) if self._labels else np.full(self.bins, 0.5)
        return self._posterior_B

    def _likelihood(self, label: int) -> np.ndarray:
        """P(bin | outcome)."""
        bins, weights = zip(*self._seen[label], strict=True) if self._seen[label] else ((), ())
        counts_B = np.bincount(np.array(bins, np.int64), np.array(weights, np.float64), self.bins)
        return np.asarray((counts_B + self.alpha) / (counts_B.sum() + self.alpha * self.bins))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [[list(e) for e in kind] for kind in self._seen], "labels": [list(e) for e in self._labels]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = tuple(deque(((int(b), float(w)) for b, w in kind), self.capacity) for kind in state["seen"])
        self._labels = deque(((bool(k), float(w)) for k, w in state["labels"]), 2 * self.capacity)
        self._posterior_B = None


def survival_probabilities(
    q: ArrayLike,
    buffer_q: ArrayLike,
    keep_rate: float = 0.5,
    target: float = 0.5,
    strength: float = 1.0,
    p_min: float = 0.05,
    balance: Balance = "target",
) -> np.ndarray:
    """Chance of survival, float64 [N], for rollouts whose chances of success are `q` [N] (equation 2, appendix A.4).

        p = clip(keep_rate + strength * slope * (q - mean) + b, p_min, 1)

    mean and variance are those of `buffer_q` [M], recent rollouts pruned or not; b is found by bisection so that
    the mean of p over them is `keep_rate`, wherever `p_min` leaves room for that. `target`: slope = keep_rate
    (target - mean) / variance. Where nothing is clipped and `strength` is 1, the share of successes among survivors is
    then expected to be `target`, from whichever side it comes. `literal`: slope = -1, the form printed in the paper;
    with b solved for, it does not depend on `target` and lowers the share of successes. An empty buffer, or one without
    variance, gives everyone the keep rate. Raises ValueError on numbers out of range or not finite.
    """
    q_N, buffer_M = np.atleast_1d(np.asarray(q, np.float64)), np.asarray(buffer_q, np.float64).ravel()
    _check(q_N, buffer_M, keep_rate, target, strength, p_min)
    if balance not in ("target", "literal"):
        raise ValueError(f"balance must be 'target' or 'literal', not {balance!r}")
    mean, variance = (buffer_M.mean(), buffer_M.var()) if len(buffer_M) else (0.0, 0.0)
    if variance < 1e-12:
        return np.full(len(q_N), max(keep_rate, p_min))
    slope = strength * (keep_rate * (target - mean) / variance if balance == "target" else -1.0)
    x_M, floor = keep_rate + slope * (buffer_M - mean), max(keep_rate, p_min)
    low, high = p_min - x_M.max(), 1 - x_M.min()
    for _ in range(BISECTIONS):
        b = (low + high) / 2
        low, high = (b, high) if np.clip(x_M + b, p_min, 1).mean() < floor else (low, b)
    return np.clip(keep_rate + slope * (q_N - mean) + high, p_min, 1)


def _check(q_N: np.ndarray, buffer_M: np.ndarray, keep_rate: float, target: float, strength: float, p: float) -> None:
    for name, values in (("q", q_N), ("buffer_q", buffer_M)):
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{name} must hold probabilities")
    if not (0 < keep_rate <= 1 and 0 <= target <= 1 and 0 <= p <= 1 and np.isfinite(strength) and strength >= 0):
        raise ValueError(
            "keep_rate must lie in (0, 1], target and p_min in [0, 1], and strength must not be negative; "
            f"not {keep_rate}, {target}, {p}, {strength}"
        )
