"""Buffer of groups between sampler and learner: in flight, and finished.

Invariants
- A batch takes the oldest weights first, then visit order. With max_lag = 0 it is the shortest prefix of visits that
  has enough admissible groups, whatever order they finished in.
- Leftover groups are either carried to the next step with their policy version, or returned as surplus.
- The lag bound is checked before a batch is collected, so that stale groups are replaced, and when it is formed.
- A rejected group that is not replaced takes a place in a batch, but never that of a waiting group.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from ..types import Group, Visit


class Launched(NamedTuple):
    visit: Visit
    size: int
    version: int
    """Oldest policy version its tokens can have."""


class Buffer:
    def __init__(self, prompts_per_step: int, max_lag: int, *, carry: bool = False) -> None:
        self.prompts_per_step = prompts_per_step
        self.wanted = prompts_per_step
        """Groups of the next batch; the rest of it is reused."""
        self.fewest = prompts_per_step
        """Groups that every later batch wants at least."""
        self.max_lag = max_lag
        self.carry = carry
        self.groups: list[Group] = []
        self.unreplaced = 0
        """Rejected groups that are not replaced and still have to take a place in a batch."""
        self._oldest: dict[int, int | None] = {}
        """Version of the oldest token of each group in `groups`, by visit."""
        self._ages: Counter[int | None] = Counter()
        """Count of `groups` by that version, as `ready` runs at every poll and must not scan them."""
        self._in_flight: dict[int, Launched] = {}
        self._flying: Counter[int] = Counter()
        """Count of groups in flight by version."""

    @property
    def missing(self) -> int:
        """Groups the next batch still needs."""
        return max(0, self.wanted - self.unreplaced - len(self.groups))

    @property
    def in_flight(self) -> list[Launched]:
        return list(self._in_flight.values())

    @property
    def outstanding(self) -> int:
        """Started groups that may still be trained, plus places that rejected ones still take."""
        return len(self.groups) + len(self._in_flight) + self.unreplaced

    def launched(self, visit: Visit, size: int, version: int) -> None:
        self._in_flight[visit.number] = Launched(visit, size, version)
        self._flying[version] += 1

    def continued(self, visit: Visit, size: int) -> None:
        """Count a group whose probe has returned as in flight with its other siblings."""
        self._in_flight[visit.number] = self._in_flight[visit.number]._replace(size=size)

    def landed(self, group: Group) -> None:
        """Count a returned group as no longer in flight; `add` is a separate call."""
        version = self._in_flight.pop(group.visit.number).version
        self._flying[version] -= 1
        if not self._flying[version]:
            del self._flying[version]

    def room(self, version: int, sampler_version: int) -> int:
        """Return how many groups may start with weights `sampler_version`; the next optimizer step is from `version`.

        The last of them is trained after all outstanding groups, a batch per step.
        """
        later = self.max_lag - (version - sampler_version)
        return self.wanted + self.fewest * later - self.outstanding if later >= 0 else 0

    def ready(self, version: int) -> bool:
        """Whether the batch is full and all leftover groups could still be trained in time, a batch per step."""
        if self.missing:
            return False
        waiting: Counter[int] = Counter()
        for oldest, count in self._ages.items():
            waiting[version if oldest is None else oldest] += count
        left, places = Counter(self._flying), self.wanted
        for age in sorted(waiting):
            taken = min(waiting[age], places)
            places -= taken
            left[age] += waiting[age] - taken
        last = -1
        for age in sorted(+left):
            last += left[age]
            if age + self.max_lag <= version + last // self.fewest:
                return False
        return True

    def add(self, group: Group) -> None:
        self.groups.append(group)
        oldest = oldest_version(group)
        self._oldest[group.visit.number] = oldest
        self._ages[oldest] += 1

    def expire(self, version: int) -> list[Group]:
        """Remove and return the groups over the lag bound for the optimizer step from `version`."""
        stale = [g for g in self.groups if version - self._age(g, version) > self.max_lag]
        if stale:
            self._keep([g for g in self.groups if version - self._age(g, version) <= self.max_lag])
        return stale

    def take(self, version: int) -> tuple[list[Group], list[Group], list[Group]]:
        """Return the batch for the optimizer step from `version` in visit order, stale groups, and the surplus."""
        stale = self.expire(version)
        waiting = sorted(self.groups, key=lambda g: (self._age(g, version), g.visit.number))
        batch, left = waiting[: self.wanted], waiting[self.wanted :]
        self.unreplaced = max(0, self.unreplaced - (self.wanted - len(batch))) if self.carry else 0
        self._keep(left if self.carry else [])
        return sorted(batch, key=lambda g: g.visit.number), stale, [] if self.carry else left

    def _keep(self, groups: list[Group]) -> None:
        self.groups = groups
        self._oldest = {group.visit.number: self._oldest[group.visit.number] for group in groups}
        self._ages = Counter(self._oldest[group.visit.number] for group in groups)

    def _age(self, group: Group, version: int) -> int:
        """Return the version of the group's oldest token; `version` for a group without tokens."""
        oldest = self._oldest[group.visit.number]
        return version if oldest is None else oldest

    def clear(self) -> None:
        self._keep([])
        self.unreplaced = 0
        self._in_flight.clear()
        self._flying.clear()


def oldest_version(group: Group) -> int | None:
    """Return the policy version of the group's oldest token; None for a group without tokens."""
    versions = np.concatenate([r.versions for r in group.rollouts])
    if len(versions) and (oldest := int(versions.min())) >= 0:  # else some token is an environment's
        return oldest
    versions = np.concatenate([r.versions[r.action_mask] for r in group.rollouts])
    return int(versions.min()) if len(versions) else None
