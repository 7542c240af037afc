"""The last rows of a growing table: add rows, read whole columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from ...base.array_json import Packed, pack

INTS, FLOATS, TRUTHS = Packed("i8", None), Packed("f8", None), Packed("?", None)


class Columns:
    """Annotation of a window's state: `Annotated[list[np.ndarray], Columns(INTS, FLOATS)]`; empty without rows."""

    def __init__(self, *columns: Packed) -> None:
        self.columns = columns

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._read)

    def _read(self, value: Any, info: ValidationInfo) -> list[np.ndarray]:
        given = value.get("columns") if isinstance(value, dict) else None
        if not isinstance(given, list) or len(given) not in (0, len(self.columns)):
            raise ValueError(f"is not a window of {len(self.columns)} columns")
        columns = [kind.read(column, info) for kind, column in zip(self.columns, given, strict=False)]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("has columns of different lengths")
        return columns


class Window:
    """Keeps the last `capacity` rows: numbers, or arrays of a shape that is the same for all rows."""

    def __init__(self, capacity: int) -> None:
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=capacity)

    def append(self, *row: Any) -> None:
        self._rows.append(row)

    def extend(self, *columns: Sequence[Any] | np.ndarray) -> None:
        """Append as many rows as each column has elements."""
        self._rows.extend(zip(*columns, strict=True))

    def columns(self) -> list[np.ndarray]:
        """Return one array [rows, ...] per column, oldest row first; empty before the first row."""
        return [np.array(column) for column in zip(*self._rows, strict=True)]

    def __len__(self) -> int:
        return len(self._rows)

    def state_dict(self) -> dict[str, Any]:
        return {"columns": [pack(column) for column in self.columns()]}

    def load(self, columns: list[np.ndarray]) -> None:
        """Load the columns of a state; see `Columns`."""
        self._rows.clear()
        self.extend(*columns)
