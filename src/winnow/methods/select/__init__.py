"""Selectors: choose the prompts to roll out next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ...types import Group, Visit
from ..pass_rates import PassRate
from .backoff import Backoff
from .greso import Greso
from .ordered import Ordered
from .pass_rate import PassRate as PassRateBand
from .uniform import Uniform


class Selector(Protocol):
    def select(self, n: int) -> list[Visit]:
        """Return the next visits in stream order: `n` to roll out, and skipped ones in between (verdict.keep False).

        Fewer only when a whole epoch, and 10,000 visits, were skipped in a row: nothing is left to roll out.
        """
        ...

    def observe(self, group: Group) -> None:
        """Learn from every finished group, also from those that a filter drops later."""
        ...

    def wants_profile(self, step: int) -> int:
        """Return the rollouts per prompt of the training profile wanted after `step` steps; 0: not wanted."""
        ...

    def profiled(self, rates: Iterable[PassRate]) -> int:
        """Take pass rates; return how many are of its prompts."""
        ...

    def end_step(self) -> None:
        """End an optimizer step; called after `metrics`."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


SELECTORS: dict[str, type] = {
    "uniform": Uniform,
    "ordered": Ordered,
    "greso": Greso,
    "backoff": Backoff,
    "pass_rate": PassRateBand,
}
"""Name -> frozen dataclass of options with `build(prompts, seed, judge) -> Selector`."""
