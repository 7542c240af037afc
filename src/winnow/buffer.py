"""Finished groups waiting for the learner.

Invariants
- A batch is taken in visit order, so with max_lag = 0 it is the shortest prefix of the stream of visits that has
  enough admissible groups, whatever order they finished in.
- What is left over is either carried to the next step, keeping its policy version, or given back as surplus.
- The lag bound is checked before a batch is collected, so that what is too old is replaced, and when it is formed.
"""

from __future__ import annotations

from .types import Group


class Buffer:
    def __init__(self, prompts_per_step: int, max_lag: int, *, carry: bool = False) -> None:
        self.prompts_per_step = prompts_per_step
        self.max_lag = max_lag
        self.carry = carry
        self.groups: list[Group] = []
        self.spent = 0
        """Groups of the coming batch that were rejected and are not replaced."""

    @property
    def missing(self) -> int:
        """Groups that the coming batch still lacks."""
        return max(0, self.prompts_per_step - len(self.groups) - self.spent)

    def add(self, group: Group) -> None:
        self.groups.append(group)

    def spend(self) -> None:
        """Count a rejected group that is not replaced."""
        self.spent += 1

    def expire(self, version: int) -> list[Group]:
        """Take out the groups that are over the lag bound for the optimizer step from `version`."""
        stale = [g for g in self.groups if lag(g, version) > self.max_lag]
        self.groups = [g for g in self.groups if lag(g, version) <= self.max_lag]
        return stale

    def take(self, version: int) -> tuple[list[Group], list[Group], list[Group]]:
        """The batch for the optimizer step from `version`, in visit order; groups over the lag bound; the surplus."""
        stale = self.expire(version)
        waiting = sorted(self.groups, key=lambda g: g.visit.number)
        size = self.prompts_per_step - self.spent
        batch, left = waiting[:size], waiting[size:]
        self.groups, self.spent = (left, 0) if self.carry else ([], 0)
        return batch, stale, [] if self.carry else left


def lag(group: Group, version: int) -> int:
    """Optimizer steps between `version` and the oldest token of the group; 0 for a group without tokens."""
    oldest = [int(r.versions[r.action_mask].min()) for r in group.rollouts if r.action_mask.any()]
    return version - min(oldest) if oldest else 0
