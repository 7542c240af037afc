"""Groups on their way to the learner: in flight, and finished.

Invariants
- A batch is taken oldest weights first, then in visit order, so with max_lag = 0 it is the shortest prefix of the
  stream of visits that has enough admissible groups, whatever order they finished in.
- What is left over is either carried to the next step, keeping its policy version, or given back as surplus.
- The lag bound is checked before a batch is collected, so that what is too old is replaced, and when it is formed.
- A rejected group that is not replaced takes a place in a batch, but never that of a group which waits.
"""

from __future__ import annotations

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
        self._in_flight: dict[int, InFlight] = {}

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

    def landed(self, group: Group) -> None:
        """It has come back; whether it is added is another question."""
        self._in_flight.pop(group.visit.number)

    def room(self, version: int, sampler_version: int) -> int:
        """How many groups may start with weights `sampler_version`, if the coming optimizer step is from `version`.

        The last of them is trained when all that is outstanding has been, a batch a step.
        """
        return self.prompts_per_step * (self.max_lag + 1 - (version - sampler_version)) - self.outstanding

    def ready(self, version: int) -> bool:
        """Whether the batch is full, and what would be left could be trained in time, a batch a step."""
        if self.missing:
            return False
        left = [oldest(group, version) for group in self._ordered(version)[self.prompts_per_step :]]
        versions = sorted([*left, *(flight.version for flight in self._in_flight.values())])
        return all(v + self.max_lag > version + i // self.prompts_per_step for i, v in enumerate(versions))

    def add(self, group: Group) -> None:
        self.groups.append(group)

    def spend(self) -> None:
        """Count a rejected group that is not replaced."""
        self.spent += 1

    def expire(self, version: int) -> list[Group]:
        """Take out the groups that are over the lag bound for the optimizer step from `version`."""
        stale = [g for g in self.groups if version - oldest(g, version) > self.max_lag]
        self.groups = [g for g in self.groups if version - oldest(g, version) <= self.max_lag]
        return stale

    def take(self, version: int) -> tuple[list[Group], list[Group], list[Group]]:
        """The batch for the optimizer step from `version`, in visit order; groups over the lag bound; the surplus."""
        stale = self.expire(version)
        waiting = self._ordered(version)
        batch, left = waiting[: self.prompts_per_step], waiting[self.prompts_per_step :]
        self.spent = max(0, self.spent - (self.prompts_per_step - len(batch))) if self.carry else 0
        self.groups = left if self.carry else []
        return sorted(batch, key=lambda g: g.visit.number), stale, [] if self.carry else left

    def _ordered(self, version: int) -> list[Group]:
        return sorted(self.groups, key=lambda g: (oldest(g, version), g.visit.number))

    def clear(self) -> None:
        self.groups, self.spent = [], 0
        self._in_flight.clear()


def oldest(group: Group, version: int) -> int:
    """Policy version of the group's oldest token; `version` for a group without tokens."""
    found = [int(r.versions[r.action_mask].min()) for r in group.rollouts if r.action_mask.any()]
    return min(found, default=version)
