"""Calibration of a divergence gate on recorded groups, and how far its figures can be believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import yaml

from .gate.divergence import TERMINATION, fires
from .replay import Recorded, ReplayError, SweepRow, check_horizon, counted

RESAMPLES = 10_000


@dataclass(frozen=True)
class Bound:
    """What a gate may get wrong; exactly one of the two."""

    precision: float | None
    """tp / cut is at least this."""
    signal_loss: float | None
    """fp / (groups that teach) is at most this eta, i.e. precision >= 1 - eta N_nonzero / N_cut (appendix C.5)."""

    def holds(self, cut: np.ndarray, tp: np.ndarray, teaching: int) -> np.ndarray:
        """bool, of the shape of the counts."""
        if self.precision is not None:
            kept: np.ndarray = tp >= self.precision * cut - 1e-9
            return kept
        assert self.signal_loss is not None
        lost: np.ndarray = cut - tp <= self.signal_loss * teaching + 1e-9
        return lost

    def __str__(self) -> str:
        return (
            f"precision >= {self.precision:g}" if self.precision is not None else f"signal loss <= {self.signal_loss:g}"
        )


@dataclass(frozen=True)
class Arm:
    """A rule to compare with, in expectation; as `SweepRow`."""

    cut: float
    tp: float
    fp: float
    precision: float | None
    recall: float | None
    safe_pct: float
    raw_pct: float
    measured_pct: float | None
    kept_norm: float | None


@dataclass(frozen=True)
class Fold:
    """What was chosen without these groups, and what it did to them. No signal: nothing met the bound."""

    signal: str | None
    k: int | None
    threshold: float | None
    groups: int
    cut: int
    tp: int
    raw_pct: float
    """Of the steps of this fold's groups."""


@dataclass(frozen=True)
class Calibration:
    """`intervals` (95%, by name as in `SweepRow`) are of the chosen gate, as if it had been given: they do not know
    that it was chosen on the same groups. `held_out` does: every group is judged by what was chosen without its fold.
    """

    bound: str
    t_max: int
    chosen: SweepRow
    intervals: dict[str, tuple[float, float] | None]
    folds: tuple[Fold, ...]
    held_out: dict[str, float | None]
    """`cut, tp, precision, raw_pct` over all folds, and `agree`, the folds that chose the same signal and step."""
    random: Arm
    """As many cuts at the same step, at random."""
    oracle: Arm
    """All zero-variance groups and no other, at the same step."""


def calibrate(
    recorded: Mapping[int, Recorded], bound: Bound, t_max: int, *, folds: int = 5, seed: int = 0
) -> Calibration:
    """The (signal, K, threshold) that saves most within `bound`: the measured share of the steps where the table has
    them, else the raw one; on ties the more precise.

    Every signal but the termination fraction, which is no divergence, is tried at every K, at every threshold that
    makes a difference. Raises ReplayError when nothing meets the bound, when there are fewer groups than folds, and
    when the Ks of the table hold different groups.
    """
    groups = _same_groups(recorded)
    for at in recorded.values():
        check_horizon(at, t_max)
    if len(groups) < folds:
        raise ReplayError(f"{len(groups)} groups cannot be split into {folds} folds; record more")
    best = _best(recorded, bound, t_max)
    if best is None:
        raise ReplayError(f"no threshold of any signal has {bound} with any cut; allow more, or record more groups")
    signal, k, threshold = best
    at = recorded[k]
    chosen = counted(at, fires(at.signal(signal), threshold), signal, threshold, t_max)
    parts = _folds(recorded, groups, bound, t_max, folds, seed)
    cut, tp = sum(f.cut for f in parts), sum(f.tp for f in parts)
    held_out = {
        "cut": cut,
        "tp": tp,
        "precision": tp / cut if cut else None,
        "raw_pct": sum(f.raw_pct * f.groups for f in parts) / len(groups),
        "agree": sum((f.signal, f.k) == (signal, k) for f in parts),
    }
    intervals = _intervals(chosen, int(at.zero_N.sum()), t_max, seed)
    return Calibration(str(bound), t_max, chosen, intervals, parts, held_out, *_arms(chosen, at, t_max))


def _same_groups(recorded: Mapping[int, Recorded]) -> list[str]:
    first, *others = recorded.values()
    for at in others:
        if odd := set(first.task_ids) ^ set(at.task_ids):
            raise ReplayError(
                f"{at.source}: K = {first.k} and K = {at.k} hold different groups, e.g. '{min(odd)}', so their savings "
                "cannot be compared; record every group at every K, or choose one with --k"
            )
    return list(first.task_ids)


def _best(recorded: Mapping[int, Recorded], bound: Bound, t_max: int) -> tuple[str, int, float] | None:
    """Signal, K and threshold; None when nothing with a cut meets the bound."""
    found: tuple[tuple[float, int, int], tuple[str, int, float]] | None = None
    for k, at in recorded.items():
        teaching = int((~at.zero_N).sum())
        for signal in at.signals:
            if signal == TERMINATION:
                continue
            edges_M, cut_M, tp_M, saved_M = _edges(at.signals[signal], at.zero_N, _savings(at, t_max))
            good_M = bound.holds(cut_M, tp_M, teaching) & (edges_M[1:] > edges_M[:-1])
            if not good_M.any():
                continue
            scores = {m: (float(saved_M[m]), int(tp_M[m]), -int(cut_M[m])) for m in np.flatnonzero(good_M).tolist()}
            most = max(scores, key=lambda m: scores[m])
            score = scores[most]
            if found is None or score > found[0]:
                found = score, (signal, k, _between(float(edges_M[most]), float(edges_M[most + 1])))
    return None if found is None else found[1]


def _savings(at: Recorded, t_max: int) -> np.ndarray:
    """float [N]: the share of all steps that cutting each group saves."""
    if at.steps_N is not None and at.steps_k_N is not None and at.steps_N.sum() > 0:
        measured: np.ndarray = (at.steps_N - at.steps_k_N) / at.steps_N.sum()
        return measured
    n = len(at.zero_N)
    return np.full(n, (t_max - at.k) / (n * t_max))


def _edges(value_N: np.ndarray, zero_N: np.ndarray, saving_N: np.ndarray) -> tuple[np.ndarray, ...]:
    """Distinct values [M + 1], closed by 1 (no threshold is higher); and of a threshold just over each, [M]: the groups
    that it cuts, the zero-variance ones of them, and the share of all steps saved.
    """
    distinct_M, index_N = np.unique(value_N, return_inverse=True)
    cut_M = np.cumsum(np.bincount(index_N, minlength=len(distinct_M)))
    tp_M = np.cumsum(np.bincount(index_N, weights=zero_N, minlength=len(distinct_M))).astype(np.int64)
    saved_M = np.round(np.cumsum(np.bincount(index_N, weights=saving_N, minlength=len(distinct_M))), 12)
    return np.append(distinct_M, 1.0), cut_M, tp_M, saved_M


def _between(low: float, high: float) -> float:
    """The number with fewest digits in (low, high], near the middle."""
    middle = (low + high) / 2
    return next((t for d in range(1, 17) if low < (t := round(middle, d)) <= high), high)


def _folds(
    recorded: Mapping[int, Recorded], groups: list[str], bound: Bound, t_max: int, folds: int, seed: int
) -> tuple[Fold, ...]:
    order_N = np.random.default_rng(seed).permutation(len(groups))
    fold_of = {groups[i]: place % folds for place, i in enumerate(order_N.tolist())}
    fold_N = {k: np.array([fold_of[task] for task in at.task_ids]) for k, at in recorded.items()}
    parts = []
    for fold in range(folds):
        others = {k: at.only(np.flatnonzero(fold_N[k] != fold)) for k, at in recorded.items()}
        size = sum(f == fold for f in fold_of.values())
        best = _best(others, bound, t_max)
        if best is None:
            parts.append(Fold(None, None, None, size, 0, 0, 0.0))
            continue
        signal, k, threshold = best
        mine = recorded[k].only(np.flatnonzero(fold_N[k] == fold))
        row = counted(mine, fires(mine.signal(signal), threshold), signal, threshold, t_max)
        parts.append(Fold(signal, k, threshold, size, row.cut, row.tp, row.raw_pct))
    return tuple(parts)


def _intervals(row: SweepRow, zero: int, t_max: int, seed: int) -> dict[str, tuple[float, float] | None]:
    """Percentile bootstrap over groups (Efron 1979). Only four kinds of group matter, so their counts are drawn."""
    n = row.groups
    counts = np.array([row.tp, row.fp, zero - row.tp, n - zero - row.fp])
    tp_R, fp_R, missed_R, kept_R = np.random.default_rng(seed).multinomial(n, counts / n, size=RESAMPLES).T
    share = 100 * (t_max - row.k) / (n * t_max)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = {
            "precision": tp_R / (tp_R + fp_R),
            "recall": tp_R / (tp_R + missed_R),
            "safe_pct": tp_R * share,
            "raw_pct": (tp_R + fp_R) * share,
            "kept_norm": np.sqrt(kept_R / (kept_R + fp_R)),
        }
    found: dict[str, tuple[float, float] | None] = {}
    for name, values_R in drawn.items():
        defined = values_R[np.isfinite(values_R)]
        low, high = np.quantile(defined, [0.025, 0.975]) if len(defined) else (math.nan, math.nan)
        found[name] = (float(low), float(high)) if len(defined) else None
    return found


def _arms(row: SweepRow, at: Recorded, t_max: int) -> tuple[Arm, Arm]:
    n, zero = row.groups, int(at.zero_N.sum())
    share, teaching = 100 * (t_max - at.k) / (n * t_max), n - zero
    best = counted(at, at.zero_N, row.signal, row.threshold, t_max).measured_pct
    everything = counted(at, np.ones(n, bool), row.signal, row.threshold, t_max).measured_pct
    tp = row.cut * zero / n
    fp, hit = row.cut - tp, row.cut / n
    random = Arm(
        cut=row.cut,
        tp=tp,
        fp=fp,
        precision=zero / n if row.cut else None,
        recall=hit if zero else None,
        safe_pct=tp * share,
        raw_pct=row.raw_pct,
        measured_pct=None if everything is None else hit * everything,
        kept_norm=math.sqrt(1 - hit) if teaching else None,
    )
    every = {
        "precision": 1.0 if zero else None,
        "recall": 1.0 if zero else None,
        "kept_norm": 1.0 if teaching else None,
    }
    return random, Arm(cut=zero, tp=zero, fp=0, safe_pct=zero * share, raw_pct=zero * share, measured_pct=best, **every)


def config_section(found: Calibration) -> str:
    """The `gates` section of a run's YAML file."""
    row = found.chosen
    options = {"name": "divergence", "signal": row.signal, "k": row.k, "threshold": row.threshold}
    text: str = yaml.safe_dump({"gates": [options]}, sort_keys=False)
    return f"# {row.cut} of {row.groups} recorded groups cut, {row.tp} of them zero-variance ({found.bound})\n{text}"


def lines(found: Calibration) -> list[str]:
    """What a reader must know beside the table."""
    row, held = asdict(found.chosen), found.held_out
    said = []
    for name, interval in found.intervals.items():
        digits = 1 if name.endswith("_pct") else 3
        if interval is not None and row[name] is not None:
            said.append(f"{name} {row[name]:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]")
    precision: Any = held["precision"]
    shown = "–" if precision is None else f"{precision:.3f}"
    thresholds = ", ".join(
        "none" if f.signal is None else f"{f.signal} < {f.threshold:g} at {f.k}" for f in found.folds
    )
    return [
        f"95% over groups, of this gate: {', '.join(said)}",
        f"held out ({len(found.folds)} folds): precision {shown}, raw {held['raw_pct']:.1f}% from {held['cut']} cuts",
        f"chosen without each fold: {thresholds}",
    ]
