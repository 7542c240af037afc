"""Survival by a sibling's worth to its own group (`balance: within`; ours).

Signal arises within groups: a rollout's advantage is its distance from the mean of its siblings, so a group is worth

    S = sum over survivors of (r_i - mean)^2          (the squared norm of Dr.GRPO's advantages)

and a survivor costs the tokens it still samples. The gate decides on each sibling at its own token, independent of
arrival order. Known then are its score and the outcomes of its prompt at earlier visits, which give a Beta distribution
of the prompt's pass rate p. Siblings are alike at first. Let A_1 and A_0 be the chances that a rule keeps a success and
a failure, kappa = p A_1 + (1 - p) A_0. Survivors are successes with the same chance mu = p A_1 / kappa, and

    E[S | p] = mu (1 - mu) E[max(M - 1, 0)],  M ~ Binomial(G, kappa)
             = p (1 - p) A_1 A_0 (G kappa - 1 + (1 - kappa)^G) / kappa^2.

A rule matters only by (A_0, A_1), its point under the ROC curve of the score. At equal kappa the best rule has p A_1 as
near to (1 - p) A_0 as the score allows: steer towards half right, from the *prompt's* side. One price for all decides
how many siblings of which prompt to keep: maximise E[S] - price * kappa, with the price that gives the keep rate. If
the score knows nothing, siblings of one prompt have equal chances.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

LEVELS, BLENDS = 24, 11
"""Number of keep rates tried, and of mixtures of keeping the best and the worst."""
RATES_P = (np.arange(32) + 0.5) / 32
"""Pass rates over which a Beta distribution is summed."""
BISECTIONS = 60


def rate_weights(wins: ArrayLike, losses: ArrayLike) -> np.ndarray:
    """Return weights of `RATES_P` under Beta(wins, losses), both [N] and above 0: float64 [N, P], rows summing to 1."""
    a_N1, b_N1 = (np.atleast_1d(np.asarray(x, np.float64))[:, None] for x in (wins, losses))
    log_NP = (a_N1 - 1) * np.log(RATES_P) + (b_N1 - 1) * np.log1p(-RATES_P)
    weight_NP = np.exp(log_NP - log_NP.max(1, keepdims=True))
    found: np.ndarray = weight_NP / weight_NP.sum(1, keepdims=True)
    return found


@dataclass(frozen=True)
class ScoreModel:
    """Every rule tried, for scores in B bins. Do not write to the arrays."""

    failure_B: np.ndarray
    """P(bin | failure)."""
    success_B: np.ndarray
    """P(bin | success)."""
    size: float
    """Siblings per group, copies counted once."""
    p_min: float

    @cached_property
    def survival_CB(self) -> np.ndarray:  # noqa: N802
        """Chance to survive, by rule and bin: mixtures of "the best first" and "the worst first" at equal levels."""
        share_B = (self.failure_B + self.success_B) / 2
        order_B = np.argsort(self.success_B / self.failure_B, kind="stable")
        rows = []
        for level in np.linspace(0, 1, LEVELS):
            low_B, high_B = _fill(share_B, order_B, level), _fill(share_B, order_B[::-1], level)
            rows += [blend * high_B + (1 - blend) * low_B for blend in np.linspace(0, 1, BLENDS)]
        return self.p_min + (1 - self.p_min) * np.array(rows)

    @cached_property
    def _kept_CP(self) -> np.ndarray:  # noqa: N802
        """kappa, by rule and pass rate."""
        a0_C1, a1_C1 = (self.survival_CB @ x_B[:, None] for x_B in (self.failure_B, self.success_B))
        return np.asarray(np.minimum(RATES_P * a1_C1 + (1 - RATES_P) * a0_C1, 1))  # rounding must not exceed 1

    @cached_property
    def _signal_CP(self) -> np.ndarray:  # noqa: N802
        """E[S | p], by rule and pass rate."""
        a0_C1, a1_C1 = (self.survival_CB @ x_B[:, None] for x_B in (self.failure_B, self.success_B))
        k_CP = self._kept_CP
        spread_CP = RATES_P * (1 - RATES_P) * a0_C1 * a1_C1 / k_CP**2
        return np.asarray(spread_CP * (self.size * k_CP - 1 + (1 - k_CP) ** self.size))

    def worth(self, weight_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the expected signal and the share kept of N prompts under each rule, both [N, C]."""
        return weight_NP @ self._signal_CP.T, weight_NP @ self._kept_CP.T


@dataclass(frozen=True)
class Price:
    """Lowest worth of a survivor. At `low` too many survive, at `high` too few; use `low` with share `share`."""

    low: float
    high: float
    share: float


def price_of(rules: ScoreModel, weight_NP: np.ndarray, keep_rate: float, count: np.ndarray | None = None) -> Price:
    """Return the price at which `keep_rate` of the siblings of N recent prompts are expected to survive.

    `count` [N]: number of siblings of each; None: equal. A group's signal is convex in the number it keeps, so the best
    answer jumps; at the jump the two sides are mixed. If `p_min` alone keeps more, or keeping all is less, return the
    nearer end.
    """
    signal_NC, kept_NC = rules.worth(weight_NP)

    def kept(price: float) -> float:
        picked_N = (signal_NC - price * kept_NC).argmax(1)
        return float(np.average(kept_NC[np.arange(len(picked_N)), picked_N], weights=count))

    low, high = -1e3, 1e3 + rules.size / rules.p_min
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) >= keep_rate else (low, middle)
    above, below = kept(low), kept(high)
    share = 1.0 if above <= below else min(max((keep_rate - below) / (above - below), 0.0), 1.0)
    return Price(low, high, share)


def survival_within(rules: ScoreModel, weight_NP: np.ndarray, price: Price) -> np.ndarray:
    """Return survival chances by bin, of siblings of N prompts whose pass rates have weights [N, P]: float64 [N, B]."""
    signal_NC, kept_NC = rules.worth(weight_NP)
    low_N, high_N = ((signal_NC - p * kept_NC).argmax(1) for p in (price.low, price.high))
    found: np.ndarray = price.share * rules.survival_CB[low_N] + (1 - price.share) * rules.survival_CB[high_N]
    return found


def _fill(share_B: np.ndarray, order_B: np.ndarray, level: float) -> np.ndarray:
    """Return 1 for the first bins in `order_B` until they make up `level` of all, a fraction for the last, else 0."""
    before_B = np.cumsum(share_B[order_B]) - share_B[order_B]
    found_B = np.empty(len(share_B))
    found_B[order_B] = np.clip((level * share_B.sum() - before_B) / share_B[order_B], 0, 1)
    return found_B
