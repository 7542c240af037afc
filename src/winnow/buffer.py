"""Finished groups waiting for the learner.

Invariants
- A group starts only if it can still be trained within the lag bound: with `ahead` groups in flight or waiting, it
  enters step `version + ahead // prompts_per_step` at the latest, so at most (max_lag + 1) * prompts_per_step are
  ever ahead. Pace, don't discard.
- A batch is taken in visit order, so with max_lag = 0 it is the shortest prefix of the stream of visits that has
  enough admissible groups, whatever order they finished in.
- The bound is checked again when the batch is formed.
"""

from __future__ import annotations

from .types import Group


class Buffer:
    def __init__(self, prompts_per_step: int, max_lag: int) -> None:
        self.prompts_per_step = prompts_per_step
        self.max_lag = max_lag
        self.groups: list[Group] = []
        self.spent = 0
        """Groups of the coming batch that were rejected and are not replaced."""

    def room(self, in_flight: int) -> int:
        """How many groups may start now."""
        return (self.max_lag + 1) * self.prompts_per_step - in_flight - len(self.groups) - self.spent

    def add(self, group: Group) -> None:
        self.groups.append(group)

    def spend(self) -> None:
        """Count a rejected group that is not replaced."""
        self.spent += 1

    @property
    def ready(self) -> bool:
        return len(self.groups) + self.spent >= self.prompts_per_step

    def take(self, version: int) -> tuple[list[Group], list[Group]]:
        """The batch for the optimizer step from `version`, in visit order; and the groups over the lag bound."""
        waiting = sorted(self.groups, key=lambda g: g.visit.number)
        fresh = [g for g in waiting if lag(g, version) <= self.max_lag]
        stale = [g for g in waiting if lag(g, version) > self.max_lag]
        size = self.prompts_per_step - self.spent
        self.groups, self.spent = fresh[size:], 0
        return fresh[:size], stale


def lag(group: Group, version: int) -> int:
    """Optimizer steps between `version` and the oldest token of the group; 0 for a group without tokens."""
    oldest = [int(r.versions[r.action_mask].min()) for r in group.rollouts if r.action_mask.any()]
    return version - min(oldest) if oldest else 0
