"""Selectors: choose the prompts to roll out next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ...types import Group, Visit
from ..pass_rates import PassRate
from .backoff import Backoff
from .bayes import Bayes
from .greso import Greso
from .ordered import Ordered
from .pass_rate import PassRate as PassRateBand
from .uniform import Uniform


class Selector(Protocol):
    """Chooses the prompts to roll out. Most derive from `winnow.methods.select.stream.StreamSelector`."""

    def select(self, n: int) -> list[Visit]:
        """Return the next visits in stream order: `n` to roll out, and the skipped ones between them.

        Skipped visits have `verdict.keep` False. Returns fewer than `n` only if a whole epoch, and 10,000 visits, were
        skipped in a row.
        """
        ...

    def observe(self, group: Group) -> None:
        """Learn from a finished group; called for each, also for those that a filter drops later."""
        ...

    def wants_profile(self, step: int) -> int:
        """Return the rollouts per prompt of a pass-rate profile to make after `step` steps; 0: no profile."""
        ...

    def profiled(self, rates: Iterable[PassRate]) -> int:
        """Receive the pass rates of a profile; return how many belong to its prompts."""
        ...

    def end_step(self) -> None:
        """End an optimizer step; called after `metrics`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state_dict`. Raises ValueError on anything else."""
        ...


SELECTORS: dict[str, type] = {
    "uniform": Uniform,
    "ordered": Ordered,
    "greso": Greso,
    "backoff": Backoff,
    "pass_rate": PassRateBand,
    "bayes": Bayes,
}
"""Name -> frozen dataclass of options with `build(prompts, seed, judge) -> Selector`."""
