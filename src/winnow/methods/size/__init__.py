"""Sizes: the number of siblings in the next group, and of groups to start at once."""

from __future__ import annotations

from typing import Protocol

from .adaptive_k import AdaptiveK
from .base import GroupSize
from .fixed import Fixed
from .rollout_batch import Adaptive, Exact
from .rollout_batch import Fixed as FixedRounds
from .sequential import Sequential

__all__ = ["ROLLOUT_BATCHES", "SIZES", "GroupSize", "RolloutBatch"]


SIZES: dict[str, type] = {"fixed": Fixed, "adaptive_k": AdaptiveK, "sequential": Sequential}
"""Name -> frozen dataclass of options with `build(num_generations) -> GroupSize`."""


class RolloutBatch(Protocol):
    """Decides how many groups to start at once while a batch is incomplete."""

    size: int
    """Most groups in a round."""
    carry: bool
    """Whether surplus groups wait for the next step; otherwise they are dropped."""

    def next(self, missing: int, in_flight: int, zero_variance_share: float | None) -> int:
        """Return the number of groups to start now, <= 0 for no start.

        `missing`: groups the batch still needs; `in_flight`: groups under way; `zero_variance_share`: of the groups
        judged in this step so far, None before the first.
        """
        ...


ROLLOUT_BATCHES: dict[str, type] = {"exact": Exact, "fixed": FixedRounds, "adaptive": Adaptive}
"""Name -> frozen dataclass of options with `build(prompts_per_step) -> RolloutBatch`."""
