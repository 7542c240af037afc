"""Filters: decide after the reward whether a group enters the batch."""

from __future__ import annotations

from .all_of import AllOf
from .base import Filter, checked_verdict
from .keep_all import KeepAll
from .zero_variance import ZeroVariance

FILTERS: dict[str, type] = {"keep_all": KeepAll, "zero_variance": ZeroVariance}
"""Name -> frozen dataclass of options that is a `Filter`, or has `build(seed) -> Filter`."""

__all__ = ["FILTERS", "AllOf", "Filter", "KeepAll", "ZeroVariance", "checked_verdict"]
