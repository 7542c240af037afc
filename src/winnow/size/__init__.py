"""Group sizes: how many siblings the next group gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .fixed import Fixed


class GroupSize(Protocol):
    def next(self) -> int: ...

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """Called once per training step with its metrics."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


SIZES: dict[str, type] = {"fixed": Fixed}
"""Name -> frozen dataclass of options with `build(num_generations) -> GroupSize`."""
