"""The last rows of a table that grows at one end: rows are added, columns are read all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base.array_json import pack, unpack

POSITIVE = 1e-300, 1e300
"""Limits of weights."""


class Window:
    """Keeps the last `capacity` rows.

    `kinds`: a letter for each column, as NumPy's kinds: `b`, `i`, `f`; a large one for columns of arrays.
    """

    def __init__(self, capacity: int, kinds: str) -> None:
        self.capacity, self.kinds = capacity, kinds
        self._columns: list[np.ndarray] = []
        self._new: list[Sequence[Any]] = []

    def append(self, *row: Any) -> None:
        """Numbers, or arrays of a shape that is the same for all rows."""
        self._new.append(row)

    def extend(self, *columns: Sequence[Any] | np.ndarray) -> None:
        """Append as many rows as each of the columns has elements."""
        self._new.extend(zip(*columns, strict=True))

    def columns(self) -> list[np.ndarray]:
        """One array [rows, ...] a column, oldest row first; none before the first row."""
        if self._new:
            new = [np.array(column) for column in zip(*self._new[-self.capacity :], strict=True)]
            rest = self.capacity - len(new[0])
            old = [column[len(column) - min(rest, len(column)) :] for column in self._columns]
            self._columns = [np.concatenate(pair) for pair in zip(old, new, strict=True)] if old else new
            self._new = []
        return self._columns

    def __len__(self) -> int:
        columns = self.columns()
        return len(columns[0]) if columns else 0

    def state_dict(self) -> dict[str, Any]:
        return {"columns": [pack(column) for column in self.columns()]}

    def load_state_dict(self, state: Mapping[str, Any], *limits: tuple[float, float]) -> None:
        """Raises ValueError on columns that `state_dict` cannot have given; `limits`: least and largest of each."""
        rows = {column["shape"][0] for column in state["columns"]}
        if len(rows) > 1 or not all(0 < n <= self.capacity for n in rows):
            raise ValueError(f"columns of {sorted(rows)} rows, where at most {self.capacity} are")
        columns = [unpack(column) for column in state["columns"]]
        found = "".join(c.dtype.kind.upper() if c.ndim == 2 else c.dtype.kind if c.ndim == 1 else "?" for c in columns)
        if columns and found != self.kinds:
            raise ValueError(f"columns of kinds {found!r}, where {self.kinds!r} are")
        for column, (low, high) in zip(columns, limits, strict=False):
            if not low <= column.min() <= column.max() <= high:
                raise ValueError(f"numbers from {column.min()} to {column.max()}, where {low} to {high} can be")
        self._columns, self._new = columns, []
