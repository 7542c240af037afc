"""Gates: during the rollout, is it worth going on?

A gate only decides; `rollout.py` stops what it says. `none` is the absence of a gate, so the table starts empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..types import Checkpoint, Group, GroupView, Verdict


class Gate(Protocol):
    at: Checkpoint
    """`Token(n)`: asked for one sibling when it has sampled n tokens. `EnvStep(k)`: asked once for the whole group."""
    needs: frozenset[str]
    """What the engine must provide, e.g. {"hidden"}."""

    def decide(self, view: GroupView) -> Verdict: ...

    def observe(self, group: Group) -> None:
        """Learn from every finished group."""
        ...

    def end_step(self) -> None:
        """An optimizer step is over; called after `metrics`."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


GATES: dict[str, type] = {}
"""Name -> frozen dataclass of options with `build(seed) -> Gate`."""
