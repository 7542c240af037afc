"""Selectors: which prompts to roll out next."""

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
        """The next visits in stream order: `n` to roll out, and in between those skipped (verdict.keep False).

        Fewer only when a whole epoch, and 10,000 visits, were skipped in a row: nothing is left to roll out.
        """
        ...

    def observe(self, group: Group) -> None:
        """Learn from every finished group, also from those a filter then drops."""
        ...

    def wants_profile(self, step: int) -> int:
        """Rollouts a prompt of the profile of all training prompts that it wants after `step` steps; 0: none."""
        ...

    def profiled(self, rates: Iterable[PassRate]) -> int:
        """Take pass rates; returns how many are of its prompts."""
        ...

    def end_step(self) -> None:
        """An optimizer step is over; called after `metrics`."""
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
