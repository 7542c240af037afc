"""Calibration of a divergence gate on recorded groups, and how far its figures can be believed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import yaml

from ..methods.gate.divergence import TERMINATION, fires
from ..methods.gate.refit import between, counts_under
from .gate_tables import Recorded, ReplayError, SweepRow, can_be_cut, check_horizon, counted

RESAMPLES = 10_000


@dataclass(frozen=True)
class Bound:
    """Limit of what a gate may get wrong; exactly one of the two."""

    precision: float | None
    """tp / cut is at least this."""
    signal_loss: float | None
    """fp / (groups that teach) is at most this eta, i.e. precision >= 1 - eta N_nonzero / N_cut (appendix C.5)."""

    def holds(self, cut: np.ndarray, tp: np.ndarray, teaching: float) -> np.ndarray:
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
class Choice:
    """A gate, by its options."""

    signal: str
    k: int
    threshold: float
    termination: float | None = None

    def cuts(self, at: Recorded) -> np.ndarray:
        """bool [N]: which groups, at step k, of those in which somebody runs."""
        ended_N = None if self.termination is None else at.signal(TERMINATION)
        return fires(at.signal(self.signal), self.threshold, ended_N, self.termination) & at.running_N

    def row(self, at: Recorded, t_max: int) -> SweepRow:
        return counted(at, self.cuts(at), self.signal, self.threshold, t_max)

    def __str__(self) -> str:
        ended = "" if self.termination is None else f" or {TERMINATION} >= {self.termination:g}"
        return f"{self.signal} < {self.threshold:g}{ended} at {self.k}"


@dataclass(frozen=True)
class Fold:
    """Choice made without these groups, and its effect on them. None: nothing met the bound."""

    choice: Choice | None
    groups: float
    cut: float
    tp: float
    raw_pct: float
    """Share of the steps of this fold's groups."""


@dataclass(frozen=True)
class Calibration:
    """`intervals` (95%, by name as in `SweepRow`) are of the chosen gate, as if it had been given: they do not know
    that it was chosen on the same groups. `held_out` does: every group is judged by what was chosen without its fold.
    """

    bound: str
    t_max: int
    choice: Choice
    chosen: SweepRow
    """Effect that the choice would have had."""
    can_be_cut: str
    """See `replay.can_be_cut`; no other group is counted as a cut, right or wrong."""
    intervals: dict[str, tuple[float, float] | None]
    folds: tuple[Fold, ...]
    held_out: dict[str, float | None]
    """`cut, tp, precision, raw_pct` over all folds, and `agree`, the folds that chose the same signal and step."""
    random: SweepRow
    """Control arm, in expectation: as many cuts at the same step, at random among the groups that can be cut."""
    oracle: SweepRow
    """All zero-variance groups that can be cut and no other, at the same step."""


def calibrate(
    recorded: Mapping[int, Recorded],
    bound: Bound,
    t_max: int,
    *,
    or_rule: bool = False,
    folds: int = 5,
    seed: int = 0,
) -> Calibration:
    """The (signal, K, threshold) that saves most within `bound`: the measured share of the steps where the table has
    them, else the raw one; on ties the more precise.

    A group of which nobody runs at step K cannot be cut there: it counts neither as a right cut nor as a wrong one.
    Every signal but the termination fraction, which is no divergence, is tried at every K, at every threshold that
    makes a difference. `or_rule` also tries it with every termination limit. Raises ReplayError when nothing meets the
    bound, when there are fewer groups than folds, when the Ks of the table hold different groups, and for the OR rule
    when it lacks measured steps.
    """
    groups = same_groups(recorded)
    for at in recorded.values():
        check_horizon(at, t_max)
        if or_rule and (at.steps_N is None or at.steps_k_N is None or TERMINATION not in at.signals):
            raise ReplayError(
                f"{at.source}: the OR rule is chosen by the steps really saved, since who has ended saves none; it "
                f"needs the columns steps, steps_k and {TERMINATION}"
            )
    if len(groups) < folds:
        raise ReplayError(f"{len(groups)} groups cannot be split into {folds} folds; record more")
    search = Search(bound, t_max, or_rule)
    choice = search.best(recorded)
    if choice is None:
        raise ReplayError(f"no threshold of any signal has {bound} with any cut; allow more, or record more groups")
    at = recorded[choice.k]
    chosen = choice.row(at, t_max)
    parts = _folds(recorded, groups, search, folds, seed)
    held_out = _held_out(parts, choice)
    intervals = _intervals(choice, at, t_max, seed)
    said = can_be_cut(at)
    return Calibration(str(bound), t_max, choice, chosen, said, intervals, parts, held_out, *_arms(chosen, at, t_max))


def _held_out(parts: tuple[Fold, ...], choice: Choice) -> dict[str, float | None]:
    cut, tp = sum(f.cut for f in parts), sum(f.tp for f in parts)
    choices = [f.choice for f in parts if f.choice is not None]
    return {
        "cut": cut,
        "tp": tp,
        "precision": tp / cut if cut else None,
        "raw_pct": sum(f.raw_pct * f.groups for f in parts) / sum(f.groups for f in parts),
        "agree": sum((c.signal, c.k) == (choice.signal, choice.k) for c in choices),
    }


def same_groups(recorded: Mapping[int, Recorded]) -> list[str]:
    """The task ids; raises ReplayError when the Ks hold different ones."""
    first, *others = recorded.values()
    for at in others:
        if odd := set(first.task_ids) ^ set(at.task_ids):
            raise ReplayError(
                f"{at.source}: K = {first.k} and K = {at.k} hold different groups, e.g. '{min(odd)}', so their savings "
                "cannot be compared; record every group at every K, or choose one with --k"
            )
    return list(first.task_ids)


@dataclass(frozen=True)
class Candidates:
    """All thresholds [M] of one signal, step and termination limit, each just over a value that was recorded."""

    signal: str
    k: int
    limit: float | None
    edges: np.ndarray
    """[M + 1]: threshold m is in (edges[m], edges[m + 1]]. -1: what the limit cuts alone; no divergence gate."""
    cut: np.ndarray
    tp: np.ndarray
    saved: np.ndarray
    """Share of all steps."""

    def threshold(self, m: int) -> float:
        return between(float(self.edges[m]), float(self.edges[m + 1]))


@dataclass(frozen=True)
class Search:
    """Candidates of a search, and what counts."""

    bound: Bound
    t_max: int
    or_rule: bool = False

    def candidates(self, recorded: Mapping[int, Recorded]) -> Iterator[Candidates]:
        """Candidates, those without a limit first."""
        for or_rule in (False, True) if self.or_rule else (False,):
            for k, at in recorded.items():
                for limit in _limits(at.signals[TERMINATION]) if or_rule else (None,):
                    for signal in at.signals:
                        if signal != TERMINATION:
                            yield self._of(at, signal, k, limit)

    def _of(self, at: Recorded, signal: str, k: int, limit: float | None) -> Candidates:
        value_N, w_N = at.signals[signal], at.weights_N
        if limit is not None:
            value_N = np.where(at.signals[TERMINATION] >= limit, -1.0, value_N)  # cut, whatever the threshold
        run_M = np.flatnonzero(at.running_N)
        weights = (w_N, w_N * at.zero_N, w_N * savings(at, self.t_max))
        sums = counts_under(value_N[run_M], *(each_N[run_M] for each_N in weights))
        return Candidates(signal, k, limit, *sums)

    def best(self, recorded: Mapping[int, Recorded]) -> Choice | None:
        """None when nothing with a cut meets the bound."""
        found: tuple[tuple[float, float, float], Choice] | None = None
        teaching = {k: float(at.weights_N[~at.zero_N].sum()) for k, at in recorded.items()}
        for c in self.candidates(recorded):
            m, score = self._most(c, teaching[c.k])
            if score is not None and (found is None or score > found[0]):
                found = score, Choice(c.signal, c.k, c.threshold(m), c.limit)
        return None if found is None else found[1]

    def _most(self, c: Candidates, teaching: float) -> tuple[int, tuple[float, float, float] | None]:
        """The candidate that saves most within the bound, and by what it is ranked."""
        possible_M = (c.edges[:-1] >= 0) & (c.edges[1:] > c.edges[:-1])
        good_M = np.flatnonzero(self.bound.holds(c.cut, c.tp, teaching) & possible_M)
        scores = {m: (float(c.saved[m]), float(c.tp[m]), -float(c.cut[m])) for m in good_M.tolist()}
        most = max(scores, key=lambda m: scores[m], default=-1)
        return most, scores.get(most)


def _limits(ended_N: np.ndarray) -> list[float]:
    """A termination limit for each share of ended trajectories that occurs, but 0."""
    distinct = np.unique(np.append(ended_N, 0.0)).tolist()
    return [between(low, high) for low, high in pairwise(distinct)]


def savings(at: Recorded, t_max: int) -> np.ndarray:
    """float [N]: the share of all steps that cutting each group saves, if it stands for itself alone."""
    if at.steps_N is not None and at.steps_k_N is not None and at.steps_N.sum() > 0:
        measured: np.ndarray = (at.steps_N - at.steps_k_N) / all_steps(at, t_max)
        return measured
    return np.full(len(at.weights_N), (t_max - at.k) / all_steps(at, t_max))


def all_steps(at: Recorded, t_max: int) -> float:
    """Environment steps of all groups: measured, or as if every trajectory ran to the end (t_max a group)."""
    measured = at.steps_k_N is not None and at.steps_N is not None and at.steps_N.sum() > 0
    return float((at.weights_N * (at.steps_N if measured else t_max)).sum())


def split(
    recorded: Mapping[int, Recorded], groups: list[str], folds: int, seed: int
) -> Iterator[tuple[dict[int, Recorded], dict[int, Recorded]]]:
    """For each fold, the groups without it and the groups in it; every group is in one."""
    order_N = np.random.default_rng(seed).permutation(len(groups))
    fold_of = {groups[i]: place % folds for place, i in enumerate(order_N.tolist())}
    fold_N = {k: np.array([fold_of[task] for task in at.task_ids]) for k, at in recorded.items()}
    for fold in range(folds):
        without, mine = (
            {k: at.only(np.flatnonzero((fold_N[k] == fold) == inside)) for k, at in recorded.items()}
            for inside in (False, True)
        )
        yield without, mine


def _folds(
    recorded: Mapping[int, Recorded], groups: list[str], search: Search, folds: int, seed: int
) -> tuple[Fold, ...]:
    parts = []
    for without, mine in split(recorded, groups, folds, seed):
        choice = search.best(without)
        at = next(iter(mine.values())) if choice is None else mine[choice.k]
        size = at.count(np.ones(len(at.task_ids), bool))
        if choice is None:
            parts.append(Fold(None, size, 0, 0, 0.0))
        else:
            row = choice.row(at, search.t_max)
            parts.append(Fold(choice, size, row.cut, row.tp, row.raw_pct))
    return tuple(parts)


def _intervals(choice: Choice, at: Recorded, t_max: int, seed: int) -> dict[str, tuple[float, float] | None]:
    """Percentile bootstrap over groups (Efron 1979). Groups that are cut alike, worth alike and of one weight are
    alike, so only the counts of these kinds are drawn.
    """
    kinds_C, n_C = np.unique(np.stack([choice.cuts(at), at.zero_N, at.weights_N], 1), axis=0, return_counts=True)
    drawn_RC = np.random.default_rng(seed).multinomial(n_C.sum(), n_C / n_C.sum(), size=RESAMPLES) * kinds_C[:, 2]
    cut_C, zero_C = kinds_C[:, 0] == 1, kinds_C[:, 1] == 1
    tp_R, fp_R, missed_R, kept_R = (
        drawn_RC[:, (cut_C == cut) & (zero_C == zero)].sum(1)
        for cut, zero in ((True, True), (True, False), (False, True), (False, False))
    )
    share_R = 100 * (t_max - choice.k) / (t_max * drawn_RC.sum(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = {
            "precision": tp_R / (tp_R + fp_R),
            "recall": tp_R / (tp_R + missed_R),
            "safe_pct": tp_R * share_R,
            "raw_pct": (tp_R + fp_R) * share_R,
            "kept_norm": np.sqrt(kept_R / (kept_R + fp_R)),
        }
    found: dict[str, tuple[float, float] | None] = {}
    for name, values_R in drawn.items():
        defined = values_R[np.isfinite(values_R)]
        low, high = np.quantile(defined, [0.025, 0.975]) if len(defined) else (math.nan, math.nan)
        found[name] = (float(low), float(high)) if len(defined) else None
    return found


def _arms(row: SweepRow, at: Recorded, t_max: int) -> tuple[SweepRow, SweepRow]:
    """At random among the groups that can be cut, and the oracle's."""
    run_N, zero_N = at.running_N, at.zero_N
    best, everything = (counted(at, cut_N, row.signal, row.threshold, t_max) for cut_N in (run_N & zero_N, run_N))
    hit = row.cut / everything.cut if everything.cut else 0.0
    tp, teaching = hit * best.cut, float(at.weights_N.sum()) - at.count(zero_N)
    random = replace(
        row,
        tp=tp,
        fp=row.cut - tp,
        precision=everything.precision if row.cut else None,
        recall=None if best.recall is None else hit * best.recall,
        safe_pct=hit * best.safe_pct,
        measured_pct=None if everything.measured_pct is None else hit * everything.measured_pct,
        kept_norm=math.sqrt(max(0.0, 1 - (row.cut - tp) / teaching)) if teaching else None,
    )
    return random, best


def config_section(found: Calibration) -> str:
    """The `gates` section of a run's YAML file."""
    row = found.chosen
    chosen = {key: value for key, value in asdict(found.choice).items() if value is not None}
    text: str = yaml.safe_dump({"gates": [{"name": "divergence", **chosen}]}, sort_keys=False)
    return (
        f"# of {row.groups:g} recorded groups {row.cut:g} cut, {row.tp:g} of them zero-variance ({found.bound})\n{text}"
    )


def lines(found: Calibration) -> list[str]:
    """Remarks that a reader needs beside the table."""
    row, held = asdict(found.chosen), found.held_out
    said = []
    for name, interval in found.intervals.items():
        digits = 1 if name.endswith("_pct") else 3
        if interval is not None and row[name] is not None:
            said.append(f"{name} {row[name]:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]")
    precision: Any = held["precision"]
    shown = "–" if precision is None else f"{precision:.3f}"
    choices = ", ".join("none" if f.choice is None else str(f.choice) for f in found.folds)
    return [
        f"{found.can_be_cut}; only these count as cuts",
        f"95% over groups, of this gate: {', '.join(said)}",
        f"held out ({len(found.folds)} folds): precision {shown}, raw {held['raw_pct']:.1f}% from {held['cut']:g} cuts",
        f"chosen without each fold: {choices}",
    ]
