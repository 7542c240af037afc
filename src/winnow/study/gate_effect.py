"""Effect of cuts on recorded groups: the share of right cuts, and the saving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..config import ConfigError
from ..methods.gate.divergence import TERMINATION, Rule, fires
from .gate_tables import Groups, Recorded


@dataclass(frozen=True)
class Effect:
    """Effect of a gate on some groups. Percentages are of their environment steps."""

    groups: float
    """Number of groups that the table's rows represent, as in the other counts."""
    cut: float
    tp: float
    """Cut and zero-variance."""
    fp: float
    precision: float | None
    """tp / cut; None without cuts."""
    recall: float | None
    safe_pct: float
    """tp (t_max - k) / (groups t_max): the saving at no cost."""
    raw_pct: float
    """cut (t_max - k) / (groups t_max)."""
    measured_pct: float | None
    """Saving in actual trajectory steps, if the table has them."""
    kept_norm: float | None
    """|A kept| / |A| of GRPO's advantages (all teaching groups of one size have the same); None if no group teaches."""

    @property
    def saved_pct(self) -> float:
        return self.raw_pct if self.measured_pct is None else self.measured_pct


@dataclass(frozen=True)
class SweepRow(Effect):
    """Effect of one threshold at one step."""

    k: int
    signal: str
    threshold: float


def effect(recorded: Groups, cut_at_N: np.ndarray, t_max: int, share: float = 1) -> Effect:
    """Count groups, the same in one order at every K, that are cut at steps int [N]; 0 for never.

    `share`: of these groups as many are cut, at random; the effect is the expected one.
    """
    first = next(iter(recorded.values()))
    cut_N, zero_N, w_N = cut_at_N > 0, first.zero_N, first.weights_N
    n, zero = first.count(w_N > 0), first.count(zero_N)
    cut, tp = share * first.count(cut_N), share * first.count(cut_N & zero_N)
    raw_N = 100 * share * w_N * np.where(cut_N, t_max - cut_at_N, 0) / (n * t_max)
    measured = None
    if first.measured:
        measured = 0.0
        for k, at in recorded.items():
            measured += 100 * share * float((w_N * savings(at, t_max))[cut_at_N == k].sum())
    return Effect(
        groups=n,
        cut=cut,
        tp=tp,
        fp=cut - tp,
        precision=tp / cut if cut else None,
        recall=tp / zero if zero else None,
        safe_pct=float(raw_N[zero_N].sum()),
        raw_pct=float(raw_N.sum()),
        measured_pct=measured,
        kept_norm=math.sqrt(max(0.0, 1 - (cut - tp) / (n - zero))) if not zero_N.all() else None,
    )


def savings(at: Recorded, t_max: int) -> np.ndarray:
    """Return the share of all environment steps that cutting each group saves, unweighted; float [N].

    Measured, or as if every trajectory ran to the end.
    """
    left_N, total = np.full(len(at), t_max - at.k), at.weights_N.sum() * t_max
    if at.measured and at.left_N is not None:
        left_N, total = at.left_N, (at.weights_N * at.columns["steps"]).sum()
    saved: np.ndarray = left_N / total
    return saved


def sweep(
    recorded: Groups,
    signal: str,
    thresholds: Sequence[float],
    t_max: int,
    termination: float | None = None,
    rule: Rule = "or",
) -> list[SweepRow]:
    """Return one row per evaluation step and threshold (the paper's table 1); rules: `gate.divergence.fires`.

    As in the paper every group under the threshold counts as cut, also one that has ended by then and cannot be cut.
    `t_max`: the most steps an episode may take. Raises ConfigError on an unknown signal or k >= t_max.
    """
    rows = []
    for at in recorded.values():
        check_horizon(at, t_max)
        value_N = at.signal(signal)
        ended_N = None if termination is None else at.signal(TERMINATION)
        for threshold in thresholds:
            cut_N = fires(value_N, threshold, ended_N, termination, rule)
            counted = asdict(effect({at.k: at}, at.k * cut_N, t_max))
            rows.append(SweepRow(**counted, k=at.k, signal=signal, threshold=float(threshold)))
    return rows


def check_horizon(at: Recorded, t_max: int) -> None:
    if at.k >= t_max:
        raise ConfigError(f"K = {at.k} is not below t_max = {t_max}: nothing is left to save; leave it out with --k")
