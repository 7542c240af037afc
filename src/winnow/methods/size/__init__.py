"""Sizes: the number of siblings in the next group, and of groups to start at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .adaptive_k import AdaptiveK
from .fixed import Fixed
from .rollout_batch import Adaptive, Exact
from .rollout_batch import Fixed as FixedRounds


class GroupSize(Protocol):
    """Decides how many siblings the next groups have."""

    @property
    def smallest(self) -> int:
        """Size of the run's smallest group."""
        ...

    @property
    def largest(self) -> int:
        """Size of the run's largest group."""
        ...

    def next(self) -> int:
        """Return the size of the next group."""
        ...

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """Learn from a training step's metrics; called once per step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state_dict`. Raises ValueError on anything else."""
        ...


SIZES: dict[str, type] = {"fixed": Fixed, "adaptive_k": AdaptiveK}
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
