"""Several evaluation steps chosen together: what saves most when each group is cut at the first that fires.

Chosen one by one, thresholds spend the same tolerance for wrong cuts several times, and later steps count groups that
an earlier one has stopped. Here a set of (K, threshold) of one signal is judged as the gate `divergence` acts; each
task type may have a signal and a set of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import yaml

from ..methods.gate.divergence import TERMINATION
from ..methods.gate.refit import between
from .gate_tables import Recorded, ReplayError, check_horizon
from .replay_stats import Bound, all_steps, same_groups, savings, split

ROUNDS = 4
"""Passes over all pairs of steps; more have never been seen to help."""
SMALL = 20
"""A task type with fewer groups has no gate of its own."""


@dataclass(frozen=True)
class Steps:
    """Effect of a set of thresholds on the groups of a table."""

    signal: str
    steps: dict[int, float]
    """K -> threshold."""
    groups: float
    cut: float
    tp: float
    precision: float | None
    saved_pct: float
    """Share of all environment steps: measured where the table has them, else as if every trajectory ran to the end."""


@dataclass(frozen=True)
class Effect:
    """What a gate did to some groups, as in `Steps`."""

    cut: float
    tp: float
    precision: float | None
    saved_pct: float


@dataclass(frozen=True)
class Plan:
    """Gate of all groups, and those of task types with one of their own; None: never cut."""

    rest: Steps | None
    types: dict[str, Steps | None]

    def __str__(self) -> str:
        return "; ".join([_gate(self.rest), *(f"{kind}: {_gate(own)}" for kind, own in self.types.items())])


@dataclass(frozen=True)
class Joint:
    """The chosen plan, and what such choices did to groups that they were made without."""

    bound: str
    groups: float
    first_k: int
    plan: Plan
    """Each effect in it is that on the groups of its choice: `rest` on all, that of a type on the type's."""
    chosen: Effect
    """Effect of the plan on all groups."""
    best_single: Steps | None
    """The best that one step can do for all groups."""
    held_out: Effect
    """Over all folds."""
    folds: tuple[Plan | None, ...]


@dataclass(frozen=True, eq=False)
class _Table:
    """One signal at S steps of N groups, in one order. A group of which nobody runs at a step has the value 2."""

    ks: tuple[int, ...]
    value_SN: np.ndarray
    saved_SN: np.ndarray
    weight_N: np.ndarray
    zero_N: np.ndarray

    def first(self, threshold_S: np.ndarray) -> np.ndarray:
        """Index of the step at which each group is cut, S for never: int [N]."""
        fires_SN = self.value_SN < threshold_S[:, None]
        found: np.ndarray = np.where(fires_SN.any(0), fires_SN.argmax(0), len(self.ks))
        return found

    def sums(self, threshold_S: np.ndarray) -> tuple[float, float, float]:
        """Weight cut, weight rightly cut, share of all steps saved."""
        at_N = self.first(threshold_S)
        cut_N = at_N < len(self.ks)
        saved_N = np.append(self.saved_SN, np.zeros((1, len(at_N))), 0)[at_N, np.arange(len(at_N))]
        w_N = self.weight_N
        return float(w_N[cut_N].sum()), float(w_N[cut_N & self.zero_N].sum()), float((w_N * saved_N).sum())


def choose_jointly(
    recorded: Mapping[int, Recorded],
    bound: Bound,
    t_max: int,
    *,
    most: int,
    per_task_type: bool = False,
    folds: int = 5,
    seed: int = 0,
) -> Joint:
    """The signal and at most `most` (K, threshold) that save most within `bound`, and how such choices fare held out.

    With two steps the answer is exact for each signal; with more, pairs of thresholds are improved in turn until none
    can be. `per_task_type` chooses so for each type of at least `SMALL` groups alone, within the bound in each; the
    others have the choice of all. Raises ReplayError as `calibrate` does, and when the table has no types.
    """
    groups = same_groups(recorded)
    for at in recorded.values():
        check_horizon(at, t_max)
        if per_task_type and at.task_types is None:
            raise ReplayError(f"{at.source}: there is no column 'task_type'; name it with --map task_type=COLUMN")
    if len(groups) < folds:
        raise ReplayError(f"{len(groups)} groups cannot be split into {folds} folds; record more")
    plan, single = best_plan(recorded, bound, t_max, most, per_task_type), best_steps(recorded, bound, t_max, 1)
    if plan is None:
        raise ReplayError(f"no threshold of any signal has {bound} with any cut; allow more, or record more groups")
    cut = tp = saved = 0.0
    found: list[Plan | None] = []
    for without, mine in split(recorded, groups, folds, seed):
        found.append(best_plan(without, bound, t_max, most, per_task_type))
        if (choice := found[-1]) is not None:
            held = effect(mine, choice, t_max)
            cut, tp = cut + held.cut, tp + held.tp
            saved += held.saved_pct * all_steps(next(iter(mine.values())), t_max)
    held_out = Effect(cut, tp, tp / cut if cut else None, saved / all_steps(next(iter(recorded.values())), t_max))
    first = recorded[min(recorded)]
    n = first.count(np.ones(len(first.task_ids), bool))
    return Joint(str(bound), n, first.k, plan, effect(recorded, plan, t_max), single, held_out, tuple(found))


def best_plan(
    recorded: Mapping[int, Recorded], bound: Bound, t_max: int, most: int, per_task_type: bool
) -> Plan | None:
    """None when nothing with a cut meets the bound."""
    rest = best_steps(recorded, bound, t_max, most)
    parts = _by_type(recorded) if per_task_type else {}
    large = {kind: part for kind, part in parts.items() if len(next(iter(part.values())).task_ids) >= SMALL}
    plan = Plan(rest, {kind: best_steps(part, bound, t_max, most) for kind, part in large.items()})
    return plan if any((plan.rest, *plan.types.values())) else None


def effect(recorded: Mapping[int, Recorded], plan: Plan, t_max: int) -> Effect:
    """Effect that a gate with this plan would have had."""
    parts = {"": recorded} if not plan.types else _by_type(recorded)
    cut = tp = saved = 0.0
    for kind, part in parts.items():
        own = plan.types.get(kind, plan.rest)
        if own is not None:
            held = judged(part, own.signal, own.steps, t_max)
            cut, tp = cut + held.cut, tp + held.tp
            saved += held.saved_pct * all_steps(next(iter(part.values())), t_max)
    return Effect(cut, tp, tp / cut if cut else None, saved / all_steps(next(iter(recorded.values())), t_max))


def _by_type(recorded: Mapping[int, Recorded]) -> dict[str, dict[int, Recorded]]:
    kinds = sorted(set(next(iter(recorded.values())).task_types or ()))
    of = {k: np.array(at.task_types, dtype=object) for k, at in recorded.items()}
    return {kind: {k: at.only(np.flatnonzero(of[k] == kind)) for k, at in recorded.items()} for kind in kinds}


def best_steps(recorded: Mapping[int, Recorded], bound: Bound, t_max: int, most: int) -> Steps | None:
    """The best over all signals; None when nothing with a cut meets the bound. Ties: the earlier signal."""
    best: Steps | None = None
    for signal in next(iter(recorded.values())).signals:
        if signal != TERMINATION:
            table = _table(recorded, signal, t_max)
            threshold_S = _search(table, bound, most)
            steps = {k: float(t) for k, t in zip(table.ks, threshold_S, strict=True) if t > 0}
            found = judged(recorded, signal, steps, t_max)
            if found.cut and (best is None or found.saved_pct > best.saved_pct + 1e-9):
                best = found
    return best


def judged(recorded: Mapping[int, Recorded], signal: str, steps: Mapping[int, float], t_max: int) -> Steps:
    """Effect that a gate with these steps would have had."""
    table = _table(recorded, signal, t_max)
    cut, tp, saved = table.sums(np.array([steps.get(k, 0.0) for k in table.ks]))
    groups = float(table.weight_N.sum())
    return Steps(signal, dict(steps), groups, cut, tp, tp / cut if cut else None, 100 * saved)


def _table(recorded: Mapping[int, Recorded], signal: str, t_max: int) -> _Table:
    ks = tuple(sorted(recorded))
    order = {task: i for i, task in enumerate(recorded[ks[0]].task_ids)}
    rows = {k: np.argsort([order[task] for task in recorded[k].task_ids]) for k in ks}
    values = [np.where(at.running_N, at.signal(signal), 2.0)[rows[k]] for k, at in sorted(recorded.items())]
    saved = [savings(at, t_max)[rows[k]] for k, at in sorted(recorded.items())]
    first = recorded[ks[0]]
    return _Table(ks, np.array(values), np.array(saved), first.weights_N[rows[ks[0]]], first.zero_N[rows[ks[0]]])


def _search(table: _Table, bound: Bound, most: int) -> np.ndarray:
    """Thresholds [S], 0 where no step is: pairs of steps improved in turn, each exactly given the others."""
    teaching = float(table.weight_N[~table.zero_N].sum())
    best_S, best = np.zeros(len(table.ks)), 0.0
    pairs = list(combinations(range(len(table.ks)), 2)) if most > 1 else []
    for _ in range(ROUNDS):
        before = best
        for pair in [*((s,) for s in range(len(table.ks))), *pairs]:
            others_S = best_S.copy()
            others_S[list(pair)] = 0
            if np.count_nonzero(others_S) + len(pair) > most:
                others_S[:] = 0
            found = _improve(table, pair, others_S, bound, teaching)
            if found is not None and found[0] > best + 1e-12:
                best, best_S = found
        if best == before:
            break
    return best_S


def _improve(
    table: _Table, pair: Sequence[int], others_S: np.ndarray, bound: Bound, teaching: float
) -> tuple[float, np.ndarray] | None:
    """The best thresholds of one or two steps, the others given: (share saved, thresholds [S])."""
    a, b = pair[0], pair[-1]
    edges = [_edges(table.value_SN[s]) for s in pair]
    n = len(table.zero_N)

    def outcome(forced: int | None) -> np.ndarray:
        """[3, N]: weight cut, rightly cut and steps saved of each group, if step `forced` fires, too."""
        value_SN = table.value_SN.copy()
        if forced is not None:
            value_SN[forced] = np.where(value_SN[forced] < 2, -1.0, 2.0)
        thresholds = others_S.copy()
        if forced is not None:
            thresholds[forced] = 1.0
        fires_SN = value_SN < thresholds[:, None]
        at_N = np.where(fires_SN.any(0), fires_SN.argmax(0), len(table.ks))
        cut_N, w_N = at_N < len(table.ks), table.weight_N
        saved_N = np.append(table.saved_SN, np.zeros((1, n)), 0)[at_N, np.arange(n)]
        return np.array([w_N * cut_N, w_N * (cut_N & table.zero_N), w_N * saved_N])

    rank_a = np.searchsorted(edges[0], table.value_SN[a], side="left")
    none, at_a = outcome(None), outcome(a)
    gain_a = _cumulative(at_a - none, rank_a, len(edges[0]))  # [3, I + 1]: of cutting the i lowest at a
    if len(pair) == 1:
        sums = none.sum(1)[:, None] + gain_a
        i, j = _most(sums, bound, teaching), 0
        if i is None:
            return None
        saved = float(sums[2].ravel()[i])
    else:
        rank_b, at_b = np.searchsorted(edges[1], table.value_SN[b], side="left"), outcome(b)
        shape = (len(edges[0]) + 1, len(edges[1]) + 1)
        both = np.array([_table_of(row, rank_a, rank_b, shape) for row in at_b - none])
        # groups not cut at a (rank >= i) but at b (rank < j): all at b, minus those cut at a already
        gain_b = both[:, -1:, :] - both[:, :-1, :]
        sums = none.sum(1)[:, None, None] + gain_a[:, :, None] + gain_b
        flat = _most(sums.reshape(3, -1), bound, teaching)
        if flat is None:
            return None
        i, j = (int(x) for x in np.unravel_index(flat, shape))
        saved = float(sums[2, i, j])
    found_S = others_S.copy()
    for s, index, edge in zip(pair, (i, j), edges, strict=False):
        found_S[s] = _between(edge, index)
    return saved, found_S


def _edges(value_N: np.ndarray) -> np.ndarray:
    """Distinct values below 1, ascending; threshold i cuts the i lowest of them."""
    distinct: np.ndarray = np.unique(value_N[value_N < 1])
    return distinct


def _between(edges: np.ndarray, index: int) -> float:
    """A threshold that cuts exactly the `index` lowest values."""
    return 0.0 if index == 0 else between(float(edges[index - 1]), float(np.append(edges, 1.0)[index]))


def _cumulative(row_3N: np.ndarray, rank_N: np.ndarray, values: int) -> np.ndarray:
    """[3, values + 1]: sums over the groups of rank below 0, 1, ..., `values`."""
    inside = rank_N < values
    sums = [np.cumsum(np.append(0.0, np.bincount(rank_N[inside], row[inside], minlength=values))) for row in row_3N]
    return np.array(sums)


def _table_of(row_N: np.ndarray, rank_a: np.ndarray, rank_b: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """[I + 2, J + 1]: at (i, j) the sum over groups of a-rank below i (the last row: any) and b-rank below j."""
    cells = np.zeros((shape[0], shape[1] - 1))
    inside = rank_b < shape[1] - 1
    np.add.at(cells, (np.minimum(rank_a, shape[0] - 1)[inside], rank_b[inside]), row_N[inside])
    below: np.ndarray = np.pad(cells, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    return below


def _most(sums_3M: np.ndarray, bound: Bound, teaching: float) -> int | None:
    """Index of the candidate that saves most within the bound; None without one that cuts."""
    cut_M, tp_M, saved_M = np.round(sums_3M, 12)
    good_M = bound.holds(cut_M, tp_M, teaching) & (cut_M > 0)
    return int(np.where(good_M, saved_M, -1.0).argmax()) if good_M.any() else None


def config_section(found: Joint) -> str:
    """The `gates` section of a run's YAML file."""
    rest, e = found.plan.rest, found.chosen
    never = {"k": found.first_k, "threshold": 0.0}
    gate: dict[str, Any] = {"name": "divergence"} | (
        never if rest is None else {"signal": rest.signal, "steps": rest.steps}
    )
    if types := found.plan.types:
        own = {kind: 0 if s is None else {"signal": s.signal, "steps": s.steps} for kind, s in types.items()}
        gate["per_task_type"] = own
    text: str = yaml.safe_dump({"gates": [gate]}, sort_keys=False)
    return (
        f"# of {found.groups:g} recorded groups {e.cut:g} cut, {e.tp:g} of them zero-variance ({found.bound})\n{text}"
    )


def lines(found: Joint) -> list[str]:
    """Effect of the choice, that of one step alone, and that of such choices on groups they do not know."""
    own = [f"  {kind:<8} {_line(s)}" for kind, s in found.plan.types.items()]
    return [
        f"together   {_line(found.plan.rest)}",
        *([*own, f"by type    {_counts(found.chosen)}"] if own else ()),
        f"one step   {_line(found.best_single)}",
        f"held out   {_counts(found.held_out)} ({len(found.folds)} folds)",
        f"chosen without each fold: {' | '.join('none' if fold is None else str(fold) for fold in found.folds)}",
    ]


def _line(row: Steps | None) -> str:
    return _gate(row) if row is None else f"{_gate(row)}: {_counts(row)}"


def _gate(row: Steps | None) -> str:
    return "never cut" if row is None else f"{row.signal} {_said(row.steps)}"


def _counts(row: Steps | Effect) -> str:
    share = "–" if row.precision is None else f"{row.precision:.3f}"
    return f"{row.cut:g} cut, {row.tp:g} rightly ({share}), {row.saved_pct:.1f}% saved"


def _said(steps: Mapping[int, float]) -> str:
    return " or ".join(f"< {t:g} at {k}" for k, t in steps.items())
