"""Sizes: how many siblings the next group gets, and how many groups to start at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .adaptive_k import AdaptiveK
from .fixed import Fixed
from .rollout_batch import Adaptive, Exact
from .rollout_batch import Fixed as FixedRounds


class GroupSize(Protocol):
    @property
    def smallest(self) -> int:
        """No group of the run is smaller."""
        ...

    @property
    def largest(self) -> int:
        """No group of the run is larger."""
        ...

    def next(self) -> int: ...

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """Called once per training step with its metrics."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


SIZES: dict[str, type] = {"fixed": Fixed, "adaptive_k": AdaptiveK}
"""Name -> frozen dataclass of options with `build(num_generations) -> GroupSize`."""


class RolloutBatch(Protocol):
    size: int
    """Groups in a round, at most."""
    carry: bool
    """Whether superfluous groups wait for the next step, or are dropped."""

    def next(self, missing: int, in_flight: int, zero_variance_share: float | None) -> int:
        """Number of groups to start now, <= 0 for none.

        `missing`: groups the batch still lacks; `in_flight`: groups under way; `zero_variance_share`: of the groups
        judged in this step so far, None when there are none.
        """
        ...


ROLLOUT_BATCHES: dict[str, type] = {"exact": Exact, "fixed": FixedRounds, "adaptive": Adaptive}
"""Name -> frozen dataclass of options with `build(prompts_per_step) -> RolloutBatch`."""
