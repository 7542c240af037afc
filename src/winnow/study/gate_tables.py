"""Tables of recorded groups, for sweeps of a gate.

The input is a table with one row per group and evaluation step: `K, task_id, reward_var` (population variance of the
final rewards of the whole group) and the signals of `gate/signals.py` at that step. Optional are `task_type`, `label`
(`all_fail`, `mixed`, `all_succeed`; checked against `reward_var`), and the environment steps that the group's
trajectories took in all (`steps`) and within their first K (`steps_k`). For a run with an audited gate, `weight` is the
inverse of the group's chance to run to its end: it represents that many groups, most of which were cut. Every count and
average below is of those (Horvitz and Thompson 1952). Other columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ..base.errors import ConfigError
from ..config.errors import suggestion
from ..env.row_files import read_file
from ..methods.gate.signals import SIGNALS, TERMINATION
from ..record.records import GATE

ZERO = 1e-16
"""Largest variance of rewards that are equal within 1e-8."""
TEXT = ("task_id", "task_type", "label")
REQUIRED = ("K", "task_id", "reward_var")
TYPES: dict[str, Any] = {
    "K": Annotated[int, Field(ge=1, le=1_000_000)],
    "task_id": Annotated[str, Field(min_length=1)],
    "reward_var": Annotated[float, Field(ge=0)],
    "task_type": str,
    "label": Literal["all_fail", "mixed", "all_succeed"],
    "steps": Annotated[float, Field(ge=0)],
    "steps_k": Annotated[float, Field(ge=0)],
    "weight": Annotated[float, Field(ge=1, le=1e12)],
    **dict.fromkeys(SIGNALS, Annotated[float, Field(ge=0, le=1)]),
}
"""Columns that are read, and their values."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The groups of a table at one evaluation step, in the order of the file."""

    source: str
    k: int
    columns: Mapping[str, np.ndarray]
    """[N] by our name: text, else float64. `weight` only if some row does not represent itself alone."""

    def __len__(self) -> int:
        return len(self.columns["task_id"])

    @property
    def signals(self) -> dict[str, np.ndarray]:
        return {name: values for name, values in self.columns.items() if name in SIGNALS}

    @property
    def weights_N(self) -> np.ndarray:  # noqa: N802
        """Number of groups each row represents."""
        return self.columns.get("weight", np.ones(len(self)))

    def count(self, which_N: np.ndarray) -> float:
        """Return the number of groups that those of bool [N] represent; whole without weights."""
        total = self.weights_N[which_N].sum()
        return float(total) if "weight" in self.columns else int(total)

    @property
    def zero_N(self) -> np.ndarray:  # noqa: N802
        """bool: all rewards equal, so the group teaches nothing."""
        zero: np.ndarray = self.columns["reward_var"] <= ZERO
        return zero

    @property
    def left_N(self) -> np.ndarray | None:  # noqa: N802
        """Environment steps that trajectories took after their k-th; None if the table does not have them."""
        if "steps" not in self.columns or "steps_k" not in self.columns:
            return None
        left: np.ndarray = self.columns["steps"] - self.columns["steps_k"]
        return left

    @property
    def measured(self) -> bool:
        """Whether the table has actual trajectory steps."""
        return self.left_N is not None and bool(self.columns["steps"].sum() > 0)

    @property
    def running_N(self) -> np.ndarray:  # noqa: N802
        """bool: some trajectory has steps left after the k-th, so the group can be cut.

        Without `steps` and `steps_k` it is False only if all trajectories are known to have ended before step k.
        """
        if self.left_N is not None:
            return self.left_N > 0
        return self.columns.get(TERMINATION, np.zeros(len(self))) < 1

    def signal(self, name: str) -> np.ndarray:
        """Return a signal's column. Raises ConfigError when it is missing, with the nearest column name."""
        if name not in self.signals:
            raise ConfigError(f"{self.source}: there is no signal '{name}'.{suggestion(name, list(self.signals))}")
        return self.columns[name]

    def only(self, rows_M: np.ndarray) -> Recorded:
        """Return some of the groups, by index."""
        return Recorded(self.source, self.k, {name: values[rows_M] for name, values in self.columns.items()})


Groups = Mapping[int, Recorded]
"""The groups of a table, by K."""


def some(recorded: Groups, rows_M: np.ndarray) -> dict[int, Recorded]:
    """Return some of the groups, by index; for tables that hold the same groups in one order at every K."""
    return {k: at.only(rows_M) for k, at in recorded.items()}


def aligned(recorded: Groups) -> dict[int, Recorded]:
    """Return the same groups in one order at every K. Raises ConfigError when the Ks hold different ones."""
    ks = sorted(recorded)
    first = recorded[ks[0]]
    place = {task: i for i, task in enumerate(first.columns["task_id"])}
    groups = {}
    for k in ks:
        at = recorded[k]
        if odd := set(place) ^ set(at.columns["task_id"]):
            raise ConfigError(
                f"{at.source}: K = {first.k} and K = {k} hold different groups, e.g. '{min(odd)}', so their savings "
                "cannot be compared; record every group at every K, or choose one with --k"
            )
        groups[k] = at.only(np.argsort([place[task] for task in at.columns["task_id"]]))
    return groups


def read_recorded(path: str | Path, mapping: Mapping[str, str] | None = None) -> dict[int, Recorded]:
    """Return a CSV, JSONL or Parquet table, or that of a run directory, as {K: groups}, ascending.

    `mapping`: our name -> the column's name in the file. A signal may also be called `<name>_mean`. Raises ConfigError
    (a missing column, a cell that is empty, no number or out of range, a label that contradicts the rewards, a group
    twice at one K, no rows) and FileNotFoundError.
    """
    path = Path(path)
    names, rows = _read(path)
    ours = _columns(path, names, mapping or {})
    if not rows:
        raise ConfigError(f"{path}: the table has no rows")
    checked = _checked(path, rows, ours)
    columns = {}
    for name in ours:
        values = [getattr(row, name) for row in checked]
        columns[name] = np.array(values, dtype=object if name in TEXT else np.float64)
    if "weight" in columns and (columns["weight"] == 1).all():
        del columns["weight"]
    whole = Recorded(str(path), 0, columns)
    found = {}
    for k in np.unique(columns["K"]).astype(int).tolist():
        found[k] = Recorded(str(path), k, whole.only(np.flatnonzero(columns["K"] == k)).columns)
    return found


def _read(path: Path) -> tuple[list[str], Sequence[Mapping[str, Any]]]:
    """Return the names of a table's columns, and its rows."""
    if path.is_dir():
        path = path / GATE
        if not path.is_file():
            raise ConfigError(
                f"{path}: absent; runs of many turns write it, with gates only if audited. Give such a run, or a table"
            )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix in (".jsonl", ".parquet", ".pq"):
        rows = [row.values for row in read_file(path)]
        return list(dict.fromkeys(name for row in rows for name in row)), rows
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = list(reader.fieldnames or ())
            rows = []
            for row in reader:
                if None in row:
                    raise ConfigError(f"{path}, line {reader.line_num}: {len(row[None])} more cells than columns")
                rows.append(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a CSV, JSONL or Parquet table: {error}") from None
    if not names:
        raise ConfigError(f"{path}: the table is empty")
    return names, rows


def _columns(path: Path, there: Sequence[str], mapping: Mapping[str, str]) -> dict[str, str]:
    """Return our name -> the name in the file, for every column present."""
    for name, column in mapping.items():
        if name not in TYPES:
            raise ConfigError(f"--map {name}={column}: '{name}' is no column we read.{suggestion(name, list(TYPES))}")
        if column not in there:
            raise ConfigError(
                f"{path}: --map {name}={column}: there is no column '{column}'.{suggestion(column, there)}"
            )
    names = dict(mapping)
    for name in TYPES:
        for candidate in (name, f"{name}_mean") if name in SIGNALS else (name,):
            if candidate in there:
                names.setdefault(name, candidate)
    for name in REQUIRED:
        if name not in names:
            hint = suggestion(name, there)
            raise ConfigError(f"{path}: there is no column '{name}'.{hint} Name it with --map {name}=COLUMN")
    if not any(name in SIGNALS for name in names):
        raise ConfigError(f"{path}: there is no column of a signal; the signals are {', '.join(SIGNALS)}")
    for column in set(names.values()):
        if there.count(column) > 1:
            raise ConfigError(f"{path}: there are {there.count(column)} columns '{column}'; keep one")
    return names


def _checked(path: Path, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Any]:
    """Return the rows as objects with our names, each present and in its range."""
    strict = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)
    fields: dict[str, Any] = {name: (TYPES[name], Field(alias=column)) for name, column in names.items()}
    model: type[BaseModel] = create_model("Row", __config__=strict, **fields)
    checked: list[Any] = []
    first: dict[tuple[int, str], int] = {}
    for number, values in enumerate(rows, 1):
        where = f"{path}, row {number}"
        try:
            row: Any = model.model_validate(values)
        except ValidationError as error:
            wrong = error.errors()[0]
            column = wrong["loc"][0]
            raise ConfigError(
                f"{where}: '{column}': {wrong['msg']} (got {values.get(str(column))!r:.50}); correct it, or leave the "
                "group out"
            ) from None
        if "steps" in names and "steps_k" in names and row.steps_k > row.steps:
            raise ConfigError(f"{where}: steps_k, the steps within the first K, exceeds steps")
        before = first.setdefault((row.K, row.task_id), number)
        if before != number:
            raise ConfigError(
                f"{where}: task '{row.task_id}' at K = {row.K} is in row {before} already; a group has one row an "
                "evaluation step (make task_id unique if it was visited twice)"
            )
        if "label" in names and (row.label == "mixed") == (row.reward_var <= ZERO):
            raise ConfigError(
                f"{where}: label '{row.label}' contradicts a reward variance of {row.reward_var:g}; correct one"
            )
        checked.append(row)
    return checked


def can_be_cut(at: Recorded) -> str:
    """Return a sentence: how many groups can be cut at step k, and how well the table knows it."""
    can, n = at.count(at.running_N), at.count(np.ones(len(at), bool))
    if at.left_N is not None:
        return f"at K = {at.k} somebody still runs in {can:g} of {n:g} groups"
    reason = "the table has no columns steps and steps_k, which tell who ended with step K itself"
    return f"at K = {at.k} somebody still runs in at most {can:g} of {n:g} groups ({reason})"
