"""Sizes: the number of siblings in the next group, and of groups to start at once."""

from __future__ import annotations

from .adaptive_k import AdaptiveK
from .allocate import Allocate
from .base import GroupSize, checked_additional_size, checked_size
from .fixed import Fixed
from .rollout_batch import AdaptiveRounds, Exact, FixedRounds, RolloutBatch
from .sequential import Sequential

__all__ = ["ROLLOUT_BATCHES", "SIZES", "GroupSize", "RolloutBatch", "checked_additional_size", "checked_size"]

SIZES: dict[str, type] = {
    "fixed": Fixed,
    "adaptive_k": AdaptiveK,
    "sequential": Sequential,
    "allocate": Allocate,
}
"""Name -> frozen dataclass of options with `build(num_generations) -> GroupSize`."""

ROLLOUT_BATCHES: dict[str, type] = {"exact": Exact, "fixed": FixedRounds, "adaptive": AdaptiveRounds}
"""Name -> frozen dataclass of options with `build(prompts_per_step) -> RolloutBatch`."""
