r"""Estimates of a rule's cost and benefit from its few removals that were overridden at random.

Design-based inference (Horvitz & Thompson 1952): the removals i = 1..N of a rule and their outcomes y_i are fixed
numbers. The only chance is our own override, I_i = 1 with the known probability \pi_i > 0, independent of all others.
Only the y_i with I_i = 1 are seen. Two means are estimated, each as a ratio of weighted sums (Hajek 1971),

    m = sum_S w_i y_i / sum_S w_i,

whose bias is of order 1/n. It is exact when all y are equal, and needs no correction where an audit failed.

- *All removals*, carried out or not: w = 1/\pi. A property of the rule: how often it is right. Error
  sum_S a_i (y_i - m)^2 / (sum_S w_i)^2 with a = w^2, which is s^2/n for Kish's (1965) effective sample size n
  = (sum w)^2 / sum w^2 when weights and values are unrelated.
- *Removals carried out*, I_i = 0: the actual loss. E[1 - I_i] = \pi_i (1/\pi_i - 1), so w = 1/\pi - 1. Both the
  estimate and its target are random; sum_S w_i y_i - sum_{not S} y_i = sum_i (I_i/\pi_i - 1) y_i has variance
  sum_i y_i^2 (1 - \pi_i)/\pi_i, estimated by sum_S a_i y_i^2 with a = (1 - \pi)/\pi^2 = w (1 + w) (for a ratio: of
  y - m). An override with certainty, \pi = 1, is no evidence of removals, and has weight 0.

**Bounds (Wilson 1927, extended).** For y in [0, s], all mu with |m - mu| <= z sd(mu), where sd(mu) is the error if
mu were true. As in Wilson's score interval, mu enters through how often y is positive: values scale the
sums with y and y^2 in the error by mu/m. With W = sum w, P = sum w y, Q0, Q1, Q2 = sum a, sum a y, sum a y^2,

    var(mu) = (Q2 mu/m - 2 Q1 mu^2/m + Q0 mu^2) / W^2 = r mu / W - c mu^2,   r = Q2/P,  c = (2 Q1 W/P - Q0) / W^2,

a quadratic in mu. For equal weights and y in {0, s} it is Wilson's interval. For skewed y, r is the mean of y weighted
by y itself, below s, and the interval narrows. A few audits may miss the largest values, and without a positive one r
is 0/0; so r gets one pseudo-audit of value s at the largest weight. Without positives that gives the upper bound
z^2 s w_max / W, near the exact one for the worst case: all the value lies where audits are rarest. c is kept
within [0, Q0/W^2], where the interval can only be too wide. The lower bound starts from m less half an audit: without
it Wilson's bound misses one time in six when the truth is so rare that a single positive audit is luck (Brown, Cai and
DasGupta 2001).
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from pydantic import Field

from ...base.state import State
from ..intervals import Z_95, student

FORGOTTEN_WEIGHT = 1e-60
"""Sum of weights below which audits are forgotten: their squares are close to 0, no basis for later removals."""
Sum = Annotated[float, Field(ge=0)]


class AuditEstimate(NamedTuple):
    """A value with its 95% interval. If nothing is known, `high` is infinite and `value` is NaN."""

    value: float
    low: float
    high: float


class WeightedMean(State, frozen=False):
    """Running sums over audits of one quantity y >= 0; the module docstring defines them."""

    w: Sum = 0.0
    wy: Sum = 0.0
    a: Sum = 0.0
    ay: Sum = 0.0
    ayy: Sum = 0.0
    top_w: Sum = 0.0
    """Largest w of any removal, audited or not."""
    top_v: Sum = 0.0
    """Largest a/w = 1/probability of any removal."""

    def removal(self, w: float, v: float) -> None:
        """Record a removal, audited or not, whose audit has, or would have had, weight `w` and a = w v."""
        self.top_w, self.top_v = max(self.top_w, w), max(self.top_v, v)

    def add(self, w: float, v: float, y: float) -> None:
        """Record an audit that showed `y`."""
        self.removal(w, v)
        self.w += w
        self.wy += w * y
        self.a += w * v
        self.ay += w * v * y
        self.ayy += w * v * y * y

    def decay(self, factor: float) -> None:
        """Multiply every weight so far by `factor`: estimates stay, but these audits count less than later ones."""
        if self.w < FORGOTTEN_WEIGHT:
            self.w = self.wy = self.a = self.ay = self.ayy = 0.0
        for name in ("w", "wy", "top_w", "top_v"):
            setattr(self, name, getattr(self, name) * factor)
        for name in ("a", "ay", "ayy"):
            setattr(self, name, getattr(self, name) * factor**2)

    def bounded(self, s: float) -> AuditEstimate:
        """Return the mean of a y in [0, s], with score bounds. NaN in [0, inf] before the first audit."""
        if self.w <= 0:
            return AuditEstimate(math.nan, 0.0, math.inf)
        if s <= 0:
            return AuditEstimate(0.0, 0.0, 0.0)
        m = self.wy / self.w
        r = (self.ayy + self.top_w * self.top_v * s * s) / (self.wy + self.top_w * s)
        share = min(1.0, max(0.0, 2 * self.ay * self.w / (self.wy * self.a) - 1)) if self.wy > 0 else 1.0
        k, c = Z_95 * Z_95 * r / self.w, Z_95 * Z_95 * share * self.a / self.w**2

        def root(x: float, sign: int) -> float:
            return (2 * x + k + sign * math.sqrt(max(0.0, 4 * x * k + k * k - 4 * c * x * x))) / (2 * (1 + c))

        half_an_audit = self.top_w * s / (2 * self.w)
        return AuditEstimate(m, max(0.0, root(max(0.0, m - half_an_audit), -1)), max(min(s, root(m, 1)), m))

    def unbounded(self) -> AuditEstimate:
        """Return the mean of a y >= 0 without a known maximum, of carried-out removals; [0, inf] below three audits.

        Normal bounds for log m (delta method): lengths spread in proportion to their mean. Guards for few audits:
        Student's quantile at Kish's effective sample size, and a pseudo-audit of the largest weight at a distance of
        the mean itself, so that equal values are not certainty.
        """
        n = self.w**2 / (self.a - self.w) if self.a > self.w > 0 else 0.0
        if n < 3 - 1e-9 or self.wy <= 0:
            return AuditEstimate(self.wy / self.w if self.w > 0 else math.nan, 0.0, math.inf)
        m = self.wy / self.w
        squares = self.ayy - 2 * m * self.ay + m * m * (self.a + self.top_w * self.top_v)
        h = min(student(n - 1) * math.sqrt(max(0.0, squares) * n / (n - 1)) / self.wy, 700.0)  # exp is finite
        return AuditEstimate(m, m * math.exp(-h), m * math.exp(h))


class Sums(State, frozen=False):
    """Record of one rule: counts, signal seen, and sums over audits. Signal: squared norm of a group's advantages."""

    removed: Sum = 0.0
    audited: Sum = 0.0
    audited_signal: Sum = 0.0
    kept_signal: Sum = 0.0
    valuable: WeightedMean = Field(default_factory=WeightedMean)
    """Share of all removals that held a signal (1 with a signal, else 0)."""
    signal: WeightedMean = Field(default_factory=WeightedMean)
    """Mean signal of all removals."""
    lost: WeightedMean = Field(default_factory=WeightedMean)
    """Signal of carried-out removals."""
    tokens: WeightedMean = Field(default_factory=WeightedMean)
    """Mean tokens of carried-out removals."""

    def remove(self, probability: float, n: int) -> None:
        self.removed += n
        v = 1 / probability
        for mean in (self.valuable, self.signal):
            mean.removal(v, v)
        for mean in (self.lost, self.tokens):
            mean.removal(v - 1, v)

    def audit(self, probability: float, signal: float, tokens: float) -> None:
        self.audited += 1
        self.audited_signal += signal
        v = 1 / probability
        self.valuable.add(v, v, float(signal > 0))
        self.signal.add(v, v, signal)
        self.lost.add(v - 1, v, signal)
        self.tokens.add(v - 1, v, tokens)

    def decay(self, factor: float) -> None:
        for name in ("removed", "audited", "audited_signal", "kept_signal"):
            setattr(self, name, getattr(self, name) * factor)
        for mean in (self.valuable, self.signal, self.lost, self.tokens):
            mean.decay(factor)

    def precision(self) -> AuditEstimate:
        """Return the share of all removals that were worthless; [0, 1] before the first audit."""
        value, low, high = self.valuable.bounded(1.0)
        return AuditEstimate(1 - value, max(0.0, 1 - high), 1 - low)

    def signal_lost(self, largest: float) -> AuditEstimate:
        """Return the share of all signal, removed and seen, lost to carried-out removals. `largest`: signal seen."""
        seen = self.audited_signal + self.kept_signal
        return share_of(self.lost.bounded(largest), self.removed, seen)

    def signal_removed(self, largest: float) -> AuditEstimate:
        """Return the share of all signal that all removals hold, as if none had been overridden."""
        return share_of(self.signal.bounded(largest), self.removed + self.audited, self.kept_signal)

    def tokens_saved(self) -> AuditEstimate:
        """Return the tokens that the carried-out removals would have cost."""
        if self.removed == 0:
            return AuditEstimate(0.0, 0.0, 0.0)
        value, low, high = self.tokens.unbounded()
        return AuditEstimate(value * self.removed, low * self.removed, high * self.removed)


def share_of(mean: AuditEstimate, n: float, rest: float) -> AuditEstimate:
    """Return n mean / (n mean + rest): it grows with the mean, so its bounds are those of the mean."""

    def share(x: float) -> float:
        return 1.0 if math.isinf(x) else n * x / (n * x + rest)

    if n == 0:
        return AuditEstimate(0.0, 0.0, 0.0)
    if rest + n * mean.high <= 0:  # no signal was ever seen, so its share is unknown
        return AuditEstimate(0.0, 0.0, 1.0)
    value = math.nan if math.isnan(mean.value) else share(mean.value) if mean.value > 0 or rest > 0 else 0.0
    return AuditEstimate(value, share(mean.low) if mean.low > 0 else 0.0, share(mean.high))
