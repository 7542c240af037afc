"""Search for the gate that saves most within a bound, on recorded groups.

One search serves one evaluation step or several, for all groups or for each task type. Each group is cut at the first
step that fires, so several steps share one tolerance for wrong cuts. A group without running trajectories at a step
cannot be cut there: it counts neither as a right cut nor as a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from ..config import ConfigError
from ..methods.gate.divergence import TERMINATION, OfType, fires
from ..methods.gate.refit import between
from .gate_effect import savings
from .gate_tables import Groups, rows_by_type, some

ROUNDS = 4
"""Passes over all pairs of steps; more have never helped."""
SMALL = 20
"""A task type with fewer groups has no separate gate."""
NOBODY, FORCED = 2.0, 1.5
"""A value above every threshold, for groups that no longer run, and a threshold above all other values."""


@dataclass(frozen=True)
class Bound:
    """Limit on a gate's mistakes; exactly one of the two."""

    precision: float | None
    """tp / cut is at least this."""
    signal_loss: float | None
    """fp / (groups that teach) is at most this eta, i.e. precision >= 1 - eta N_nonzero / N_cut (appendix C.5)."""

    def holds(self, cut: np.ndarray, tp: np.ndarray, teaching: float) -> np.ndarray:
        """Return whether the bound holds, bool of the shape of the counts."""
        if self.precision is not None:
            kept: np.ndarray = tp >= self.precision * cut - 1e-9
            return kept
        assert self.signal_loss is not None
        lost: np.ndarray = cut - tp <= self.signal_loss * teaching + 1e-9
        return lost

    def __str__(self) -> str:
        if self.precision is not None:
            return f"precision >= {self.precision:g}"
        return f"signal loss <= {self.signal_loss:g}"


@dataclass(frozen=True)
class Choice(OfType):
    """A signal and its thresholds, with a termination limit if the OR rule was chosen."""

    termination: float | None = None

    def cut_at(self, recorded: Groups) -> np.ndarray:
        """Return the step at which each group is cut, int [N]; 0 for never."""
        at_N = np.zeros(len(next(iter(recorded.values()))), int)
        for k in sorted(self.steps, reverse=True):  # write the first step that fires last
            at = recorded[k]
            ended_N = None if self.termination is None else at.signal(TERMINATION)
            at_N[fires(at.signal(self.signal), self.steps[k], ended_N, self.termination) & at.running_N] = k
        return at_N

    def __str__(self) -> str:
        ended = "" if self.termination is None else f" or {TERMINATION} >= {self.termination:g}"
        return f"{self.signal} " + " or ".join(f"< {t:g}{ended} at {k}" for k, t in self.steps.items())


@dataclass(frozen=True)
class Plan:
    """Gate of all groups, and gates of task types with their own; None: never cut."""

    rest: Choice | None
    types: dict[str, Choice | None]

    @property
    def cuts(self) -> bool:
        return any((self.rest, *self.types.values()))

    def cut_at(self, recorded: Groups) -> np.ndarray:
        """Return the step at which each group is cut, int [N]; 0 for never."""
        first = next(iter(recorded.values()))
        at_N = np.zeros(len(first), int)
        if self.rest is not None:
            at_N = self.rest.cut_at(recorded)
        for kind, own in self.types.items():
            mine_N = first.columns["task_type"] == kind
            at_N[mine_N] = 0 if own is None else own.cut_at(recorded)[mine_N]
        return at_N

    def __str__(self) -> str:
        gates = {"": self.rest} | {f"{kind}: ": own for kind, own in self.types.items()}
        return "; ".join(f"{of}{'never cut' if gate is None else gate}" for of, gate in gates.items())


@dataclass(frozen=True)
class Search:
    """Search space and bound of a calibration."""

    bound: Bound
    t_max: int
    most: int = 1
    """Most evaluation steps. Two are solved exactly for each signal; with more, pairs are improved in turn."""
    or_rule: bool = False
    """Also try each threshold with every termination limit; one evaluation step."""
    per_task_type: bool = False
    """Choose separately for each type of at least `SMALL` groups; the others use the choice for all."""

    def __post_init__(self) -> None:
        if self.or_rule and (self.most > 1 or self.per_task_type):
            raise ConfigError("--steps above 1 and --per-task-type go without --or-rule; leave it out")

    def plan(self, recorded: Groups) -> Plan:
        types: dict[str, Choice | None] = {}
        if self.per_task_type:
            for kind, rows_M in rows_by_type(next(iter(recorded.values()))).items():
                if len(rows_M) >= SMALL:
                    types[kind] = self.best(some(recorded, rows_M))
        return Plan(self.best(recorded), types)

    def best(self, recorded: Groups) -> Choice | None:
        """Return the choice that saves most within the bound; ties: more precise, then first. None: no choice cuts."""
        best, choice = NOTHING, None
        for table in self.tables(recorded):
            score, threshold_S = table.search(self.bound, self.most)
            if score > best:
                steps = {k: float(t) for k, t in zip(table.ks, threshold_S, strict=False) if t > 0}
                best, choice = score, Choice(table.signal, steps, table.limit)
        return choice

    def tables(self, recorded: Groups) -> Iterator[Table]:
        """Yield tables to search at once: a signal, at all steps or at one. Those with a termination limit are last."""
        parts = [recorded] if self.most > 1 else [{k: at} for k, at in recorded.items()]
        limited = [(part, limit) for part in parts for limit in _limits(part)] if self.or_rule else []
        for part, limit in [*((part, None) for part in parts), *limited]:
            for signal in next(iter(part.values())).signals:
                if signal != TERMINATION:
                    yield Table.of(part, signal, self.t_max, limit)

    def tried(self, recorded: Groups) -> dict[int, np.ndarray]:
        """Return every gate of one step, by K: weight cut, weight rightly cut and share of all steps saved, [3, M]."""
        found: dict[int, list[np.ndarray]] = {k: [] for k in recorded}
        for table in replace(self, most=1).tables(recorded):
            _, _, sums = table.candidates((0, 1), np.zeros(2))
            found[table.ks[0]].append(sums[:, 1:, 0])
        return {k: np.concatenate(parts, axis=1) for k, parts in found.items()}


Score = tuple[float, float, float]
"""Share saved, weight rightly cut, minus weight cut: the highest is best."""
NOTHING: Score = (0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Table:
    """One signal at S steps of N groups, closed by a step `never` without running groups."""

    signal: str
    limit: float | None
    ks: tuple[int, ...]
    value_SN: np.ndarray
    """[S + 1, N]. `NOBODY`: cannot be cut. -1: cut by the termination limit, whatever the threshold."""
    saved_SN: np.ndarray
    weight_N: np.ndarray
    zero_N: np.ndarray

    @classmethod
    def of(cls, recorded: Groups, signal: str, t_max: int, limit: float | None) -> Table:
        first = next(iter(recorded.values()))
        values, saved = [], []
        for at in recorded.values():
            value_N = at.signals[signal]
            if limit is not None:
                value_N = np.where(at.signals[TERMINATION] >= limit, -1.0, value_N)
            values.append(np.where(at.running_N, value_N, NOBODY))
            saved.append(savings(at, t_max))
        never_N = np.full(len(first), NOBODY)
        value_SN, saved_SN = np.array([*values, never_N]), np.array([*saved, 0 * never_N])
        return cls(signal, limit, tuple(recorded), value_SN, saved_SN, first.weights_N, first.zero_N)

    def search(self, bound: Bound, most: int) -> tuple[Score, np.ndarray]:
        """Improve single steps and pairs of steps in turn, each exactly given the others: thresholds [S + 1]."""
        never = len(self.ks)
        pairs = [(s, never) for s in range(never)]
        if most > 1:
            pairs += combinations(range(never), 2)
        best, best_S = NOTHING, np.zeros(never + 1)
        for _ in range(ROUNDS):
            before = best
            for pair in pairs:
                others_S = best_S.copy()
                others_S[list(pair)] = 0
                if np.count_nonzero(others_S) + (1 if never in pair else 2) > most:
                    others_S[:] = 0
                score, found_S = self._improved(pair, others_S, bound)
                if score > best:
                    best, best_S = score, found_S
            if best == before:
                break
        return best, best_S

    def _improved(self, pair: tuple[int, int], others_S: np.ndarray, bound: Bound) -> tuple[Score, np.ndarray]:
        """Return the best thresholds of two steps, given the others."""
        edges_a, edges_b, sums = self.candidates(pair, others_S)
        cut_M, tp_M, saved_M = np.round(sums.reshape(3, -1), 12)
        within_M = bound.holds(cut_M, tp_M, float(self.weight_N[~self.zero_N].sum())) & (cut_M > 0)
        within_M[0] = False  # no threshold at either step: no gate, or that of the others
        best_M = np.flatnonzero(within_M)
        if not len(best_M):
            return NOTHING, others_S
        for rank_M in (saved_M, tp_M, -cut_M):
            best_M = best_M[rank_M[best_M] == rank_M[best_M].max()]
        m = best_M[0]
        found_S = others_S.copy()
        for s, edges, index in zip(pair, (edges_a, edges_b), np.unravel_index(m, sums.shape[1:]), strict=True):
            if index > 0:
                found_S[s] = between(float(edges[index - 1]), float(edges[index]))
        return (float(saved_M[m]), float(tp_M[m]), -float(cut_M[m])), found_S

    def candidates(self, pair: tuple[int, int], others_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count the cuts of every two thresholds of two steps, given the others.

        Returns the edges of both steps and sums [3, I + 1, J + 1]: weight cut, weight rightly cut, share of all steps
        saved. Threshold i > 0 lies in (edges[i - 1], edges[i]]; 0 means no threshold.
        """
        a, b = pair
        none_3N = self._outcome(others_S)
        gain_a_3N = self._outcome(_with(others_S, a, FORCED)) - none_3N
        gain_b_3N = self._outcome(_with(others_S, b, FORCED)) - none_3N
        edges_a, rank_a = self._ranks(a)
        edges_b, rank_b = self._ranks(b)
        sums_a, sums_b = np.zeros((len(edges_a), 3)), np.zeros((len(edges_a) * len(edges_b), 3))
        np.add.at(sums_a, rank_a, gain_a_3N.T)
        np.add.at(sums_b, rank_a * len(edges_b) + rank_b, gain_b_3N.T)
        cells_b = sums_b.T.reshape(3, len(edges_a), len(edges_b))
        # Threshold i cuts ranks below i; a group that it leaves is cut at b if its rank is below j at b.
        at_a = _below(sums_a.T, 1)
        left_b = cells_b.sum(1, keepdims=True) - _below(cells_b, 1)
        return edges_a, edges_b, none_3N.sum(1)[:, None, None] + at_a[:, :, None] + _below(left_b, 2)

    def _outcome(self, threshold_S: np.ndarray) -> np.ndarray:
        """Return weight cut, weight rightly cut and share of all steps saved, of each group: [3, N]."""
        fires_SN = self.value_SN < threshold_S[:, None]
        cut_N = fires_SN.any(0)
        fires_SN[-1] = True
        saved_N = self.saved_SN[fires_SN.argmax(0), np.arange(len(self.weight_N))]
        return self.weight_N * np.array([cut_N, cut_N & self.zero_N, saved_N])

    def _ranks(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """Return distinct values in [0, 1) closed by 1, and each group's rank; other values have the last rank."""
        value_N = self.value_SN[s]
        inside_N = (value_N >= 0) & (value_N < 1)
        edges = np.append(np.unique(value_N[inside_N]), 1.0)
        return edges, np.where(inside_N, np.searchsorted(edges, value_N), len(edges) - 1)


def _with(threshold_S: np.ndarray, s: int, threshold: float) -> np.ndarray:
    changed_S = threshold_S.copy()
    changed_S[s] = threshold
    return changed_S


def _below(cells: np.ndarray, axis: int) -> np.ndarray:
    """Return sums over all lower indices of an axis."""
    sums: np.ndarray = np.cumsum(cells, axis) - cells
    return sums


def _limits(recorded: Groups) -> list[float]:
    """Return a termination limit for each nonzero share of ended trajectories at the only step."""
    [at] = recorded.values()
    distinct = np.unique(np.append(at.signals[TERMINATION], 0.0)).tolist()
    return [between(low, high) for low, high in pairwise(distinct)]
