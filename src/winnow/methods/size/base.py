"""Interface of group sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base.errors import ConfigError
from ...base.state import Stateful
from ...types import Group, GroupKind, Prompt
from ..group_kind import GroupJudge


class GroupSize(Stateful, ABC):
    """Decides how many siblings the next groups have. To add a size, derive from it and write `size_for`."""

    smallest: int
    """Size of the run's smallest group."""
    largest: int
    """Size of the run's largest group."""
    in_parts: bool = False
    """Whether siblings may join a finished group (`additional_size`)."""

    def begin(self, prompts: Sequence[Prompt], judge: GroupJudge) -> None:
        """Receive the training prompts; called once, before the first group."""
        return

    @abstractmethod
    def size_for(self, prompt: Prompt) -> int:
        """Return the size of the next group, which is of this prompt: from `smallest` to `largest`."""

    def additional_size(self, group: Group, kind: GroupKind) -> int:
        """Return how many siblings join a group whose parts so far are finished; 0: it is whole."""
        return 0

    def observe_group(self, group: Group) -> None:
        """Learn from a finished group; called for each, also for those that a filter drops later.

        It may set its rollouts' `survival_p`, with which `unbiased` weights divide.
        """
        return

    def observe_step(self, metrics: Mapping[str, float]) -> None:
        """Learn from a training step's metrics; called once per step."""
        return


def checked_size(sizes: GroupSize, prompt: Prompt) -> int:
    """Return `size_for`. Raises ConfigError unless it is a whole number from `smallest` to `largest`."""
    return _whole(sizes, "size_for", sizes.size_for(prompt), sizes.smallest, sizes.largest)


def checked_additional_size(sizes: GroupSize, group: Group, kind: GroupKind) -> int:
    """Return `additional_size`. Raises ConfigError unless it leaves the group at most `largest` rollouts."""
    most = sizes.largest - len(group.rollouts)
    return _whole(sizes, "additional_size", sizes.additional_size(group, kind), 0, most)


def _whole(sizes: GroupSize, name: str, number: Any, low: int, high: int) -> int:
    if not isinstance(number, int | np.integer) or not low <= number <= high:
        raise ConfigError(
            f"group_size: {type(sizes).__name__}.{name} returned {number!r}; return a whole number from {low} to "
            f"{high} here (smallest is {sizes.smallest}, largest {sizes.largest})"
        )
    return int(number)
