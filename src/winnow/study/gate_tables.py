"""Gates over recorded groups: the cuts of a threshold, and how well a signal predicts worthless groups.

The input is a table with one row per group and evaluation step: `K, task_id, reward_var` (population variance of the
final rewards of the whole group) and the signals of `gate/signals.py` at that step. Optional are `task_type`, `label`
(`all_fail`, `mixed`, `all_succeed`; checked against `reward_var`), and the environment steps that the group's
trajectories took in all (`steps`) and within their first K (`steps_k`). For a run with an audited gate, `weight` is the
inverse of the group's chance to run to its end: it represents that many groups, most of which were cut. Every count and
average below is of those (Horvitz and Thompson 1952). Other columns are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from ..base.install import install
from ..config import suggestion
from ..env.row_files import read_file
from ..methods.gate.divergence import TERMINATION
from ..methods.gate.signals import SIGNALS
from ..record.records import GATE

TEXT = ("task_id", "task_type", "label")
REQUIRED = ("K", "task_id", "reward_var")
COLUMNS = (*REQUIRED, "task_type", "label", "steps", "steps_k", "weight", *SIGNALS)
RANGES = {"K": (1.0, math.inf, "a whole number from 1"), "weight": (1.0, 1e12, "in [1, 1e12]")}
RANGES |= dict.fromkeys(SIGNALS, (0.0, 1.0, "in [0, 1]"))
LABELS = {"all_fail": True, "mixed": False, "all_succeed": True}
ZERO = 1e-16
"""Largest variance of rewards that are equal within 1e-8."""


class ReplayError(ValueError):
    """An unusable table, or a question it cannot answer; the message names file, column or line."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The groups of a table at one evaluation step, in the order of the file. Arrays are [N]."""

    source: str
    k: int
    task_ids: tuple[str, ...]
    task_types: tuple[str, ...] | None
    reward_var_N: np.ndarray
    signals: Mapping[str, np.ndarray]
    steps_N: np.ndarray | None = None
    """Environment steps of all trajectories together."""
    steps_k_N: np.ndarray | None = None
    """Environment steps within the first k of each trajectory."""
    weight_N: np.ndarray | None = None
    """Number of groups each row represents; None: itself."""

    @property
    def weights_N(self) -> np.ndarray:  # noqa: N802
        return np.ones(len(self.task_ids)) if self.weight_N is None else self.weight_N

    def count(self, which_N: np.ndarray) -> float:
        """Return the number of groups that those of bool [N] represent; whole without weights."""
        total = self.weights_N[which_N].sum()
        return int(total) if self.weight_N is None else float(total)

    @property
    def zero_N(self) -> np.ndarray:  # noqa: N802
        """bool: all rewards equal, so the group teaches nothing."""
        zero: np.ndarray = self.reward_var_N <= ZERO
        return zero

    @property
    def measured(self) -> bool:
        """Whether the table has actual trajectory steps."""
        return self.steps_N is not None and self.steps_k_N is not None and bool(self.steps_N.sum() > 0)

    @property
    def running_N(self) -> np.ndarray:  # noqa: N802
        """bool: some trajectory has steps left after the k-th, so the group can be cut.

        Without `steps` and `steps_k` it is False only if all trajectories are known to have ended before step k.
        """
        if self.steps_N is not None and self.steps_k_N is not None:
            left: np.ndarray = self.steps_N > self.steps_k_N
            return left
        return self.signals[TERMINATION] < 1 if TERMINATION in self.signals else np.ones(len(self.task_ids), bool)

    def signal(self, name: str) -> np.ndarray:
        """Return a signal's column. Raises ReplayError when it is missing, with the nearest column name."""
        if name not in self.signals:
            raise ReplayError(f"{self.source}: there is no signal '{name}'.{suggestion(name, list(self.signals))}")
        return self.signals[name]

    def only(self, rows_M: np.ndarray) -> Recorded:
        """Return some of the groups, by index."""

        def pick(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[rows_M]

        types = None if self.task_types is None else tuple(self.task_types[i] for i in rows_M)
        return Recorded(
            self.source,
            self.k,
            tuple(self.task_ids[i] for i in rows_M),
            types,
            self.reward_var_N[rows_M],
            {name: values[rows_M] for name, values in self.signals.items()},
            pick(self.steps_N),
            pick(self.steps_k_N),
            pick(self.weight_N),
        )


Groups = Mapping[int, Recorded]
"""The groups of a table, by K."""


def some(recorded: Groups, rows_M: np.ndarray) -> dict[int, Recorded]:
    """Return some of the groups, by index; for tables that hold the same groups in one order at every K."""
    return {k: at.only(rows_M) for k, at in recorded.items()}


def rows_by_type(at: Recorded) -> dict[str, np.ndarray]:
    """Return the indices of each task type's groups. Raises ReplayError when the table has no types."""
    if at.task_types is None:
        raise ReplayError(f"{at.source}: there is no column 'task_type'; name it with --map task_type=COLUMN")
    types_N = np.array(at.task_types, dtype=object)
    return {kind: np.flatnonzero(types_N == kind) for kind in sorted(set(at.task_types))}


def read_recorded(path: str | Path, mapping: Mapping[str, str] | None = None) -> dict[int, Recorded]:
    """Return a CSV, JSONL or Parquet table, or that of a run directory, as {K: groups}, ascending.

    `mapping`: our name -> the column's name in the file. A signal may also be called `<name>_mean`. Raises ReplayError
    (a missing column, a cell that is empty, no number or out of range, a label that contradicts the rewards, a group
    twice at one K, no rows) and FileNotFoundError.
    """
    path = Path(path)
    names = _columns(path, table := _read(path, mapping or {}), mapping or {})
    columns = {name: _column(path, name, column, table) for name, column in names.items()}
    _check_rows(path, names, columns)
    found = {}
    for k in sorted(set(columns["K"].tolist())):
        at = np.flatnonzero(columns["K"] == k)
        part = {name: values[at] for name, values in columns.items()}
        found[int(k)] = Recorded(
            str(path),
            int(k),
            tuple(part["task_id"].tolist()),
            tuple(part["task_type"].tolist()) if "task_type" in part else None,
            part["reward_var"],
            {name: part[name] for name in SIGNALS if name in part},
            part.get("steps"),
            part.get("steps_k"),
            part.get("weight") if (columns.get("weight", np.ones(1)) != 1).any() else None,
        )
    return found


def _read(path: Path, mapping: Mapping[str, str]) -> pa.Table:
    if path.is_dir():
        path = path / GATE
        if not path.is_file():
            raise ReplayError(
                f"{path}: absent; runs of many turns write it, with gates only if audited. Give such a run, or a table"
            )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    text = {mapping.get(name, name): pa.string() for name in TEXT}
    try:
        if path.suffix in (".jsonl", ".parquet", ".pq"):
            return _table(path, [row.values for row in read_file(path)])
        options = csv.ConvertOptions(column_types=text, strings_can_be_null=True)
        return csv.read_csv(path, convert_options=options)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ReplayError(f"{path}: not a CSV, JSONL or Parquet table: {error}") from None


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table. pyarrow's own JSON reader ends the process at a line that is `null`."""
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({name: [row.get(name) for row in rows] for name in names})
    except (pa.ArrowException, OverflowError) as error:
        raise ReplayError(f"{path}: a column has values of several types, or too large ones: {error}") from None


def _columns(path: Path, table: pa.Table, mapping: Mapping[str, str]) -> dict[str, str]:
    """Return our name -> the name in the file, for every column present."""
    there = table.column_names
    for name, column in mapping.items():
        if name not in COLUMNS:
            raise ReplayError(f"--map {name}={column}: '{name}' is no column we read.{suggestion(name, COLUMNS)}")
        if column not in there:
            raise ReplayError(
                f"{path}: --map {name}={column}: there is no column '{column}'.{suggestion(column, there)}"
            )
    names = dict(mapping)
    for name in COLUMNS:
        for candidate in (name, f"{name}_mean") if name in SIGNALS else (name,):
            if candidate in there:
                names.setdefault(name, candidate)
    for name in REQUIRED:
        if name not in names:
            hint = suggestion(name, there)
            raise ReplayError(f"{path}: there is no column '{name}'.{hint} Name it with --map {name}=COLUMN")
    if not any(name in SIGNALS for name in names):
        raise ReplayError(f"{path}: there is no column of a signal; the signals are {', '.join(SIGNALS)}")
    for column in set(names.values()):
        if there.count(column) > 1:
            raise ReplayError(f"{path}: there are {there.count(column)} columns '{column}'; keep one")
    if table.num_rows == 0:
        raise ReplayError(f"{path}: the table has no rows")
    return names


def _column(path: Path, name: str, column: str, table: pa.Table) -> np.ndarray:
    """Return str or float64 [rows], every cell present and finite."""
    values = table.column(column).to_pylist()
    found: list[Any] = []
    for row, value in enumerate(values):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise ReplayError(f"{_where(path, row)}: '{column}' is empty; compute it, or leave the group out")
        try:
            found.append(str(value) if name in TEXT else float(value))
        except (TypeError, ValueError):
            raise ReplayError(f"{_where(path, row)}: '{column}' is not a number: {value!r}") from None
    return np.array(found, dtype=object if name in TEXT else np.float64)


def _check_rows(path: Path, names: Mapping[str, str], columns: Mapping[str, np.ndarray]) -> None:
    for name, values in columns.items():
        if name not in TEXT:
            low, high, wanted = RANGES.get(name, (0.0, math.inf, "at least 0"))
            good = (values >= low) & (values <= high) & np.isfinite(values)
            if name == "K":
                good &= values == np.floor(values)
            if not good.all():
                row = int(np.argmin(good))
                raise ReplayError(f"{_where(path, row)}: '{names[name]}' must be {wanted}, not {values[row]:g}")
    if "steps" in columns and "steps_k" in columns and (wrong := columns["steps_k"] > columns["steps"]).any():
        raise ReplayError(
            f"{_where(path, int(np.argmax(wrong)))}: steps_k, the steps within the first K, exceeds steps"
        )
    seen: dict[tuple[float, str], int] = {}
    for row, key in enumerate(zip(columns["K"].tolist(), columns["task_id"].tolist(), strict=True)):
        if key in seen:
            raise ReplayError(
                f"{_where(path, row)}: task '{key[1]}' at K = {key[0]:g} is in row {seen[key] + 1} already; a group "
                "has one row an evaluation step (make task_id unique if it was visited twice)"
            )
        seen[key] = row
    for row, label in enumerate(columns["label"].tolist() if "label" in columns else ()):
        if label not in LABELS:
            raise ReplayError(f"{_where(path, row)}: label '{label}' is none of {', '.join(LABELS)}")
        if LABELS[label] != bool(columns["reward_var"][row] <= ZERO):
            variance = columns["reward_var"][row]
            raise ReplayError(f"{_where(path, row)}: label '{label}' contradicts a reward variance of {variance:g}")


def _where(path: Path, row: int) -> str:
    return f"{path}, row {row + 1}"


def can_be_cut(at: Recorded) -> str:
    """Return a sentence: how many groups can be cut at step k, and how well the table knows it."""
    can, n = at.count(at.running_N), at.count(np.ones(len(at.task_ids), bool))
    if at.steps_N is not None and at.steps_k_N is not None:
        return f"at K = {at.k} somebody still runs in {can:g} of {n:g} groups"
    reason = "the table has no columns steps and steps_k, which tell who ended with step K itself"
    return f"at K = {at.k} somebody still runs in at most {can:g} of {n:g} groups ({reason})"


@dataclass(frozen=True)
class Correlation:
    """How well a signal at step k predicts the reward variance. None if a quantity is not defined (no spread)."""

    k: int
    task_type: str | None
    signal: str
    groups: float
    zero_variance: float
    spearman_rho: float | None
    """Rank correlation with the reward variance (table 7)."""
    p_value: float | None
    """None, too, for a table with weights: its rows are no sample in which each counts once."""
    auroc: float | None
    """Chance that a group with variance has the higher value than one without (ties count half)."""


def correlate(recorded: Groups, *, by_task_type: bool = False) -> list[Correlation]:
    """Return one row per evaluation step and signal; with `by_task_type` for each type alone.

    Raises ReplayError when the table has no types, or scipy is not installed.
    """
    rows = []
    for at in recorded.values():
        if not by_task_type:
            rows += [_correlation(at, name, None) for name in at.signals]
            continue
        for kind, rows_M in rows_by_type(at).items():
            part = at.only(rows_M)
            rows += [_correlation(part, name, kind) for name in part.signals]
    return rows


def _correlation(at: Recorded, signal: str, task_type: str | None) -> Correlation:
    try:
        from scipy import stats
    except ImportError:
        raise ReplayError(f"rank correlations need scipy; {install('gate')}") from None
    value_N, zero_N, w_N = at.signals[signal], at.zero_N, at.weights_N
    zero, teaching = float(w_N[zero_N].sum()), float(w_N[~zero_N].sum())
    rank_N, other_N = midranks(value_N, w_N), midranks(at.reward_var_N, w_N)
    rho = p = auroc = None
    if np.ptp(value_N) > 0 and np.ptp(at.reward_var_N) > 0:
        covariance = np.cov(rank_N, other_N, aweights=w_N)
        rho = float(covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1]))
        p = float(stats.spearmanr(value_N, at.reward_var_N).pvalue) if at.weight_N is None else None
        p = p if p is not None and math.isfinite(p) else None  # only two groups
    if zero and teaching:
        auroc = float((w_N * rank_N)[~zero_N].sum() - teaching**2 / 2) / (zero * teaching)
    return Correlation(at.k, task_type, signal, at.count(w_N > 0), at.count(zero_N), rho, p, auroc)


def midranks(value_N: np.ndarray, weight_N: np.ndarray) -> np.ndarray:
    """Return the weight of all lower values and half that of equal ones, float [N]; without weights, ranks from 1/2."""
    _, index_N = np.unique(value_N, return_inverse=True)
    per_M = np.bincount(index_N, weight_N)
    ranks: np.ndarray = (np.cumsum(per_M) - per_M / 2)[index_N]
    return ranks
