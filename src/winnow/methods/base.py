"""Optional hooks that the options of any method may define:

problems(run)   yields conflicts with the rest of the configuration; called once, before anything is built
charts(name)    returns charts of its metrics for the report page; `name` is its name in the run
wants_signal    True if it skips or drops groups with equal rewards; an advantage that learns from them is then refused
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.state import Stateful
from ..config import RunConfig
from ..types import Prompt


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for the cross-checks of its methods."""

    config: RunConfig
    prompts: Sequence[Prompt]
    options: Mapping[str, Sequence[Any]]
    """Config key -> options of the methods named under it."""
    names: Mapping[str, Sequence[str]]
    """Config key -> names of those methods, as written."""
    filters: Sequence[Any]
    """The `Filter` of each entry of `filter`: its options need not be one."""
    group_relative: bool
    """Whether the advantage learns nothing from groups with equal rewards."""
    greedy_baseline: bool
    """Whether groups have one more rollout, at temperature 0."""
    smallest_group: int
    """Rollouts in the smallest group that can start."""
    least_rewards: int
    """Rewards needed to judge a group."""

    def problems(self) -> Iterator[str]:
        """Yield conflicts, as `key: what is wrong; what to do`."""
        for key, methods in {**self.options, "filter": self.filters}.items():
            for place, each in enumerate(methods):
                if getattr(each, "wants_signal", False) and not self.group_relative:
                    yield (
                        f"{key}: {self.names[key][place]} skips groups with equal rewards, but advantage: "
                        f"{self.names['advantage'][0]} can learn from them; choose another {key}, or an advantage "
                        "relative to the group"
                    )
        for key, options in self.options.items():
            for each in options:
                if problems := getattr(each, "problems", None):
                    for problem in problems(self):
                        yield f"{key}: {problem}"


def refuse_unused(options: Any, names: Sequence[str], why: str) -> None:
    """Raise ValueError where one of these options was changed, for it has no effect. `why`: `without KEY; REMEDY`."""
    for name in names:
        if getattr(options, name) != getattr(type(options), name):
            raise ValueError(f"{name} has no effect {why}")


class LearningMethod(Stateful):
    """Default hooks of selectors, gates and filters; those that learn override them."""

    def end_step(self) -> None:
        """End an optimizer step; called after `metrics`."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step."""
        return {}


@dataclass(frozen=True)
class Chart:
    """One chart of the report page."""

    title: str
    lines: Mapping[str, str]
    """Metric -> name in the legend."""
    share: bool = False
    """The axis ends at 1."""
    percent: bool = False
    zero: bool = True
    """The axis starts at 0."""
    section: str = ""
    """Title of its own section; empty: the chart is shown with the groups."""
