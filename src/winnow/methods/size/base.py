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
    """Decides how many siblings the next groups have."""

    smallest: int
    """Size of the run's smallest group."""
    largest: int
    """Size of the run's largest group."""
    in_parts: bool = False
    """Whether siblings may join a finished group (`more`)."""

    def begin(self, prompts: Sequence[Prompt], judge: GroupJudge) -> None:
        """Receive the training prompts; called once, before the first group."""
        return

    @abstractmethod
    def next(self, prompt: Prompt) -> int:
        """Return the size of the next group, which is of this prompt."""

    def more(self, group: Group, kind: GroupKind) -> int:
        """Return how many siblings join a group whose parts so far are finished; 0: it is whole."""
        return 0

    def learn(self, group: Group) -> None:
        """Learn from a finished group; called for each, also for those that a filter drops later.

        It may set its rollouts' `survival_p`, with which `unbiased` weights divide.
        """
        return

    def observe(self, step_stats: Mapping[str, float]) -> None:
        """Learn from a training step's metrics; called once per step."""
        return

    def size_for(self, prompt: Prompt) -> int:
        """Return `next`. Raises ConfigError unless it is a whole number from `smallest` to `largest`."""
        return self._whole("next", self.next(prompt), self.smallest, self.largest)

    def joining(self, group: Group, kind: GroupKind) -> int:
        """Return `more`. Raises ConfigError unless it is a whole number that leaves the group at most `largest`."""
        return self._whole("more", self.more(group, kind), 0, self.largest - len(group.rollouts))

    def _whole(self, name: str, number: Any, low: int, high: int) -> int:
        if not isinstance(number, int | np.integer) or not low <= number <= high:
            raise ConfigError(
                f"group_size: {type(self).__name__}.{name} returned {number!r}; return a whole number from {low} to "
                f"{high} here (smallest is {self.smallest}, largest {self.largest})"
            )
        return int(number)
