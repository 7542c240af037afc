"""Curriculum: every prompt once per epoch, in the order of the data set or of one of its columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.dotted import nearest
from ...types import Prompt
from ..base import refuse_unused
from ..group_kind import BY_REWARDS, GroupJudge
from .stream import StreamSelector

MAX_NAMED_VALUES = 6
"""Number of column values named in an error message."""


@dataclass(frozen=True)
class Ordered:
    """Curriculum: every prompt once per epoch, in the same order each time, easy to hard if `by` gives difficulty."""

    by: str | None = None
    """Column of numbers to sort by, ascending, e.g. `difficulty`; ties keep the order of the data set. None: the order
    of the data set."""
    levels: list[str] | None = None
    """Values of that column from first to last, if they are words: `[easy, medium, hard]`."""
    descending: bool = False
    """Start with the largest number, or the last of `levels`, or, without `by`, at the end of the data set."""

    def __post_init__(self) -> None:
        if self.by is None:
            refuse_unused(self, ["levels"], "without by, the column that they are values of; remove it")
        if self.levels is not None and len(set(self.levels)) != len(self.levels):
            raise ValueError(f"levels has a value twice: {self.levels}")

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> StreamSelector:
        """Build it. Raises ValueError for a missing value, or one that is neither a number nor one of `levels`."""
        rank_N = np.arange(len(prompts), dtype=np.float64) if self.by is None else self._ranks(self.by, prompts)
        return StreamSelector(prompts, seed, order_N=np.argsort(-rank_N if self.descending else rank_N, kind="stable"))

    def _ranks(self, column: str, prompts: Sequence[Prompt]) -> np.ndarray:
        """Return the sort key of each prompt, float64 [N]."""
        known = None if self.levels is None else {level: float(i) for i, level in enumerate(self.levels)}
        rank_N = np.empty(len(prompts))
        for i, prompt in enumerate(prompts):
            value = prompt.columns.get(column)
            rank = _number(value) if known is None else known.get(value if isinstance(value, str) else str(value))
            if rank is None:
                raise ValueError(f"ordered: prompt '{prompt.id}' {self._lack(column, value, prompts)}")
            rank_N[i] = rank
        return rank_N

    def _lack(self, column: str, value: Any, prompts: Sequence[Prompt]) -> str:
        columns = list(prompts[0].columns)
        if column not in columns:
            return (
                f"has no column '{column}' (columns: {', '.join(sorted(columns)) or 'none'}).{nearest(column, columns)}"
            )
        if value is None:
            return f"has no value in column '{column}'; give it one, or leave the prompt out"
        if self.levels is not None:
            return f"has {column} {value!r:.60}, which is none of levels: {', '.join(self.levels)}"
        if isinstance(value, str):
            words = dict.fromkeys(str(p.columns.get(column)) for p in prompts[:1000])
            some = ", ".join(list(words)[:MAX_NAMED_VALUES]) + (", ..." if len(words) > MAX_NAMED_VALUES else "")
            return f"has the word {value!r:.60} in column '{column}'; say which comes first: levels: [{some}] in order"
        return f"has {value!r:.60} in column '{column}', which is no number"


def _number(value: Any) -> float | None:
    """Return a float; None for values that are no comparable number."""
    if isinstance(value, str):  # of a CSV file, where 0.50 stays as it is written
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool | int | float | np.generic) and not np.isnan(number := float(value)):
        return number
    return None
