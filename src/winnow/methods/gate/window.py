"""The last rows of a growing table: add rows, read whole columns."""

from __future__ import annotations

from collections import deque
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


class Window(deque[tuple[Any, ...]]):
    """Keeps the last `maxlen` rows: numbers, or arrays of a shape that is the same for all rows."""

    def columns(self) -> list[np.ndarray]:
        """Return one array [rows, ...] per column, oldest row first; empty before the first row."""
        return [np.array(column) for column in zip(*self, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"columns": [pack(column) for column in self.columns()]}

    def load(self, columns: list[np.ndarray]) -> None:
        """Load the columns of a state; see `Columns`."""
        self.clear()
        self.extend(zip(*columns, strict=True))
