"""Groups on their way to the learner: in flight, and finished.

Invariants
- A batch is taken oldest weights first, then in visit order, so with max_lag = 0 it is the shortest prefix of the
  stream of visits that has enough admissible groups, whatever order they finished in.
- What is left over is either carried to the next step, keeping its policy version, or given back as surplus.
- The lag bound is checked before a batch is collected, so that what is too old is replaced, and when it is formed.
- A rejected group that is not replaced takes a place in a batch, but never that of a group which waits.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ..types import Group, Visit


class InFlight(NamedTuple):
    visit: Visit
    size: int
    version: int
    """The oldest that its tokens can have."""


class Buffer:
    def __init__(self, prompts_per_step: int, max_lag: int, *, carry: bool = False) -> None:
        self.prompts_per_step = prompts_per_step
        self.max_lag = max_lag
        self.carry = carry
        self.groups: list[Group] = []
        self.spent = 0
        """Groups that were rejected and are not replaced, whose places in a batch are still to be taken."""
        self._oldest: dict[int, int | None] = {}
        """Version of the oldest token of each group in `groups`, by visit."""
        self._ages: Counter[int | None] = Counter()
        """Groups in `groups` by that version: `ready` runs at every poll and must not go through all of them."""
        self._in_flight: dict[int, InFlight] = {}
        self._flying: Counter[int] = Counter()
        """Groups in flight by version."""

    @property
    def missing(self) -> int:
        """Groups that the coming batch still lacks."""
        return max(0, self.prompts_per_step - self.spent - len(self.groups))

    @property
    def in_flight(self) -> list[InFlight]:
        return list(self._in_flight.values())

    @property
    def outstanding(self) -> int:
        """Groups that were started and may still be trained, and the places that rejected ones still take."""
        return len(self.groups) + len(self._in_flight) + self.spent

    def launched(self, visit: Visit, size: int, version: int) -> None:
        self._in_flight[visit.number] = InFlight(visit, size, version)
        self._flying[version] += 1

    def landed(self, group: Group) -> None:
        """It has come back; whether it is added is another question."""
        version = self._in_flight.pop(group.visit.number).version
        self._flying[version] -= 1
        if not self._flying[version]:
            del self._flying[version]

    def room(self, version: int, sampler_version: int) -> int:
        """How many groups may start with weights `sampler_version`, if the coming optimizer step is from `version`.

        The last of them is trained when all that is outstanding has been, a batch a step.
        """
        return self.prompts_per_step * (self.max_lag + 1 - (version - sampler_version)) - self.outstanding

    def ready(self, version: int) -> bool:
        """Whether the batch is full, and what would be left could be trained in time, a batch a step."""
        if self.missing:
            return False
        waiting: Counter[int] = Counter()
        for oldest, count in self._ages.items():
            waiting[version if oldest is None else oldest] += count
        left, places = Counter(self._flying), self.prompts_per_step
        for age in sorted(waiting):
            taken = min(waiting[age], places)
            places -= taken
            left[age] += waiting[age] - taken
        last = -1
        for age in sorted(+left):
            last += left[age]
            if age + self.max_lag <= version + last // self.prompts_per_step:
                return False
        return True

    def add(self, group: Group) -> None:
        self.groups.append(group)
        self._oldest[group.visit.number] = found = oldest_version(group)
        self._ages[found] += 1

    def spend(self) -> None:
        """Count a rejected group that is not replaced."""
        self.spent += 1

    def expire(self, version: int) -> list[Group]:
        """Take out the groups that are over the lag bound for the optimizer step from `version`."""
        stale = [g for g in self.groups if version - self._age(g, version) > self.max_lag]
        if stale:
            self._keep([g for g in self.groups if version - self._age(g, version) <= self.max_lag])
        return stale

    def take(self, version: int) -> tuple[list[Group], list[Group], list[Group]]:
        """The batch for the optimizer step from `version`, in visit order; groups over the lag bound; the surplus."""
        stale = self.expire(version)
        waiting = self._ordered(version)
        batch, left = waiting[: self.prompts_per_step], waiting[self.prompts_per_step :]
        self.spent = max(0, self.spent - (self.prompts_per_step - len(batch))) if self.carry else 0
        self._keep(left if self.carry else [])
        return sorted(batch, key=lambda g: g.visit.number), stale, [] if self.carry else left

    def _keep(self, groups: list[Group]) -> None:
        self.groups = groups
        self._oldest = {group.visit.number: self._oldest[group.visit.number] for group in groups}
        self._ages = Counter(self._oldest[group.visit.number] for group in groups)

    def _age(self, group: Group, version: int) -> int:
        """Version of the group's oldest token; `version` for a group without tokens."""
        oldest = self._oldest[group.visit.number]
        return version if oldest is None else oldest

    def _ordered(self, version: int) -> list[Group]:
        return sorted(self.groups, key=lambda g: (self._age(g, version), g.visit.number))

    def clear(self) -> None:
        self._keep([])
        self.spent = 0
        self._in_flight.clear()
        self._flying.clear()


def oldest_version(group: Group) -> int | None:
    """Policy version of the group's oldest token; None for a group without tokens."""
    found = [int(r.versions[r.action_mask].min()) for r in group.rollouts if r.action_mask.any()]
    return min(found, default=None)
