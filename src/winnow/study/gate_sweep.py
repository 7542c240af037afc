"""Sweep of the mid-trajectory gate over recorded groups: every signal, evaluation step and threshold.

A gate cuts a group when its signal at step K is below the threshold. The sweep reports, for each signal and step, how
well the signal separates groups and what the best threshold cuts. It chooses the gate that saves most while enough of
its cuts are right, and judges each group by the gate chosen without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import yaml

from ..base.errors import ConfigError
from ..methods.gate.divergence import OfType, config_entry
from ..methods.gate.signals import TERMINATION
from ..methods.posterior import auroc, midranks
from .gate_tables import Groups, Recorded, aligned, some

FOLDS = 5
SMALL = 20
"""A task type with fewer groups has no separate gate."""


@dataclass(frozen=True)
class Sweep:
    """Options of a sweep."""

    t_max: int
    """Most environment steps of an episode."""
    precision: float = 0.8
    """Least share of the cuts that must be right."""
    signal: str | None = None
    """Only this signal; None: all in the table."""
    thresholds: tuple[float, ...] = ()
    """Only these thresholds, with a row for each; empty: all, with a row for the best."""
    count_ended: bool = False
    """Also count groups that ended by step K, as the paper does. No gate can cut them."""

    def countable(self, at: Recorded) -> np.ndarray:
        """Return which groups count as cut when their signal is low; bool [N]."""
        return np.ones(len(at), bool) if self.count_ended else at.running_N

    def signals(self, at: Recorded) -> list[str]:
        """Return the names of the signals to sweep. Raises ConfigError when the only one is missing."""
        if self.signal is None:
            return list(at.signals)
        at.signal(self.signal)
        return [self.signal]


@dataclass(frozen=True)
class Effect:
    """Effect of a gate on some groups. Percentages are of their environment steps."""

    groups: float
    """Number of groups that the table's rows represent, as in the other counts."""
    zero: float
    """Zero-variance groups."""
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

    def __str__(self) -> str:
        right = "" if self.precision is None else f" ({self.precision:.3f})"
        return f"{self.cut:.4g} cut, {self.tp:.4g} right{right}, {self.saved_pct:.1f}% saved"


@dataclass(frozen=True)
class Choice:
    """A gate of one signal at one step."""

    k: int
    signal: str
    threshold: float

    def cuts(self, at: Recorded, sweep: Sweep) -> np.ndarray:
        """Return which groups the gate cuts; bool [N]."""
        below_N: np.ndarray = at.signal(self.signal) < self.threshold
        return below_N & sweep.countable(at)

    def __str__(self) -> str:
        return f"{self.signal} < {self.threshold:g} at {self.k}"


@dataclass(frozen=True)
class Row:
    """A signal at a step: how well it separates groups, and what a threshold cuts."""

    k: int
    signal: str
    auroc: float | None
    """Chance that a group with variance has the higher value than one without (ties count half)."""
    rho: float | None
    """Spearman's rank correlation with the reward variance (table 7)."""
    threshold: float | None
    """None: no threshold has the precision."""
    effect: Effect


@dataclass(frozen=True)
class Swept:
    """The rows of a sweep, and the gate that saves most within the precision."""

    task_type: str | None
    """None: all groups."""
    rows: tuple[Row, ...]
    chosen: Choice | None
    effect: Effect | None
    """Effect of the choice on the groups it was chosen on."""
    held_out: Effect
    """Effect when every group is judged by the gate chosen on the other folds."""
    at_random: Effect | None
    """Expected effect of as many cuts at the same step among the groups that can be cut."""
    oracle: Effect | None
    """Effect of cutting exactly the zero-variance groups that can be cut at the same step."""


def run_sweep(recorded: Groups, sweep: Sweep, *, by_task_type: bool = False) -> list[Swept]:
    """Sweep over all groups; with `by_task_type` also over each type of at least `SMALL` groups.

    Raises ConfigError on an unknown signal, K >= t_max, fewer groups than folds, Ks with different groups, and on
    missing task types.
    """
    groups = aligned(recorded)
    for k in groups:
        if k >= sweep.t_max:
            raise ConfigError(
                f"K = {k} is not below t_max = {sweep.t_max}: nothing is left to save; leave it out with --k"
            )
    swept = [_swept(groups, sweep, None)]
    if by_task_type:
        first = next(iter(groups.values()))
        if "task_type" not in first.columns:
            raise ConfigError(f"{first.source}: there is no column 'task_type'; name it with --map task_type=COLUMN")
        types_N = first.columns["task_type"]
        for kind in sorted(set(types_N)):
            rows_M = np.flatnonzero(types_N == kind)
            if len(rows_M) >= SMALL:
                swept.append(_swept(some(groups, rows_M), sweep, kind))
    return swept


def _swept(groups: Groups, sweep: Sweep, task_type: str | None) -> Swept:
    n = len(next(iter(groups.values())))
    if n < FOLDS:
        raise ConfigError(f"{n} groups cannot be split into {FOLDS} folds; record more")
    rows = []
    for at in groups.values():
        for signal in sweep.signals(at):
            rows += _rows(at, signal, sweep)
    chosen = _choose(groups, sweep)
    own = at_random = oracle = None
    if chosen is not None:
        at = groups[chosen.k]
        can_N = sweep.countable(at)
        own = effect({at.k: at}, at.k * chosen.cuts(at, sweep), sweep.t_max)
        at_random = effect({at.k: at}, at.k * can_N, sweep.t_max, share=own.cut / at.count(can_N))
        oracle = effect({at.k: at}, at.k * (can_N & at.zero_N), sweep.t_max)
    return Swept(task_type, tuple(rows), chosen, own, _held_out(groups, sweep), at_random, oracle)


def _rows(at: Recorded, signal: str, sweep: Sweep) -> list[Row]:
    """Return a row with the best threshold, or one for each given threshold."""
    own_auroc, rho = separation(at, signal)
    best = _best(at, signal, sweep)
    thresholds: Sequence[float | None] = [None if best is None else best[1].threshold]
    if sweep.thresholds and signal != TERMINATION:
        thresholds = sweep.thresholds
    rows = []
    for threshold in thresholds:
        cut_N = np.zeros(len(at), bool)
        if threshold is not None:
            cut_N = Choice(at.k, signal, threshold).cuts(at, sweep)
        rows.append(Row(at.k, signal, own_auroc, rho, threshold, effect({at.k: at}, at.k * cut_N, sweep.t_max)))
    return rows


Score = tuple[float, float, float]
"""Share saved, weight rightly cut, minus weight cut: the highest is best."""


def _best(at: Recorded, signal: str, sweep: Sweep) -> tuple[Score, Choice] | None:
    """Return the threshold of a signal that saves most within the precision; None if none does."""
    if signal == TERMINATION:
        return None
    can_N, value_N = sweep.countable(at), at.signal(signal)
    if sweep.thresholds:
        low_M = high_M = np.array(sweep.thresholds)
    else:  # every threshold above `low`, up to `high`, cuts the same groups
        low_M = np.unique(value_N[can_N & (value_N < 1)])
        high_M = np.append(low_M[1:], 1.0)[: len(low_M)]
    order_N = np.argsort(value_N)
    num_below_M = np.searchsorted(value_N[order_N], high_M)
    weight_N = at.weights_N * can_N
    sums = []
    for counted_N in (weight_N, weight_N * at.zero_N, weight_N * savings(at, sweep.t_max)):
        running_sum = np.concatenate([[0.0], np.cumsum(counted_N[order_N])])
        sums.append(np.round(running_sum[num_below_M], 12))
    cut_M, tp_M, saved_M = sums
    best = None
    for m in np.flatnonzero((cut_M > 0) & (tp_M >= sweep.precision * cut_M - 1e-9)):
        score = (float(saved_M[m]), float(tp_M[m]), -float(cut_M[m]))
        if best is None or score > best[0]:
            best = score, Choice(at.k, signal, between(float(low_M[m]), float(high_M[m])))
    return best


def between(low: float, high: float) -> float:
    """Return the number with fewest digits in (low, high], near the middle."""
    middle = (low + high) / 2
    return next((t for d in range(1, 17) if low < (t := round(middle, d)) <= high), high)


def _choose(groups: Groups, sweep: Sweep) -> Choice | None:
    """Return the gate that saves most within the precision; ties: more precise, then first."""
    best = None
    for at in groups.values():
        for signal in sweep.signals(at):
            own = _best(at, signal, sweep)
            if own is not None and (best is None or own[0] > best[0]):
                best = own
    return None if best is None else best[1]


def _held_out(groups: Groups, sweep: Sweep) -> Effect:
    n = len(next(iter(groups.values())))
    fold_N = np.empty(n, int)
    fold_N[np.random.default_rng(0).permutation(n)] = np.arange(n) % FOLDS
    cut_at_N = np.zeros(n, int)
    for fold in range(FOLDS):
        choice = _choose(some(groups, np.flatnonzero(fold_N != fold)), sweep)
        mine_M = np.flatnonzero(fold_N == fold)
        if choice is not None:
            cut_at_N[mine_M] = choice.k * choice.cuts(groups[choice.k].only(mine_M), sweep)
    return effect(groups, cut_at_N, sweep.t_max)


def effect(recorded: Groups, cut_at_N: np.ndarray, t_max: int, share: float = 1) -> Effect:
    """Count groups, the same in one order at every K, that are cut at steps int [N]; 0 for never.

    `share`: as many of these groups are cut, at random; the effect is the expected one.
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
        zero=zero,
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


def separation(at: Recorded, signal: str) -> tuple[float | None, float | None]:
    """Return AUROC and Spearman's rho of a signal for the reward variance; None where a quantity has no spread."""
    value_N, variance_N, zero_N, w_N = at.signal(signal), at.columns["reward_var"], at.zero_N, at.weights_N
    rho = None
    if np.ptp(value_N) > 0 and np.ptp(variance_N) > 0:
        covariance = np.cov(midranks(value_N, w_N), midranks(variance_N, w_N), aweights=w_N)
        rho = float(covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1]))
    both_kinds = zero_N.any() and not zero_N.all()
    return auroc(value_N, ~zero_N, w_N) if both_kinds else None, rho


def config_section(swept: Sequence[Swept], precision: float) -> str:
    """Return the `gates` section of a run's YAML file. Raises ConfigError when no gate was chosen."""
    gates = {}
    for part in swept:
        own = part.chosen
        gates[part.task_type] = None if own is None else OfType(own.signal, {own.k: own.threshold})
    if not any(gates.values()):
        raise ConfigError(
            f"no threshold of any signal has precision >= {precision:g} with any cut; lower --precision, or record "
            "more groups"
        )
    types = {kind: gate for kind, gate in gates.items() if kind is not None}
    text: str = yaml.safe_dump({"gates": [config_entry(gates[None], types)]}, sort_keys=False)
    return text
