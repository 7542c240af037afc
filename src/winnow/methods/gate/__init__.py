"""Gates: during the rollout, is it worth going on?

A gate only decides; `rollout.py` stops what it says. `none` is the absence of a gate, so it is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...types import Checkpoint, EnvStep, Group, GroupView, Token, Verdict
from .divergence import Divergence
from .quality import Arrol
from .random_cut import RandomCut


class Gate(Protocol):
    at: Checkpoint | tuple[EnvStep, ...]
    """`Token(n)`: asked for one sibling when it has sampled n tokens. `EnvStep(k)`: asked once for the whole group.

    Several environment steps: asked at each of them, until it stops the group.
    """
    needs: frozenset[str]
    """What the engine must provide, e.g. {"hidden"}."""

    def decide(self, view: GroupView) -> Verdict:
        """A gate asked at tokens may also have `decide_many(views)`, which says the same of many at once."""
        ...

    def observe(self, group: Group) -> None:
        """Learn from every finished group."""
        ...

    def end_step(self) -> None:
        """An optimizer step is over; called after `metrics`."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def env_steps(at: Checkpoint | tuple[EnvStep, ...]) -> tuple[int, ...]:
    """The environment steps of a gate's `at`; none for a token checkpoint."""
    if isinstance(at, Token):
        return ()
    return (at.k,) if isinstance(at, EnvStep) else tuple(step.k for step in at)


def decide_many(gate: Gate, views: Sequence[GroupView]) -> list[Verdict]:
    """What the gate says of each, in their order."""
    many = getattr(gate, "decide_many", None)
    return many(views) if many else [gate.decide(view) for view in views]


GATES: dict[str, type] = {"divergence": Divergence, "random": RandomCut, "arrol": Arrol}
"""Name -> frozen dataclass of options with `build(seed) -> Gate`."""
