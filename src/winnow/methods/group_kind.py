"""Which groups have a signal: one judge for selectors, filters, stop conditions, metrics and the ledger.

A group is judged once, by the rewards that its advantage uses, with a tolerance. A group that a gate cut has no
rewards; it counts as the gate's verdict says (`Verdict.counts_as`). Groups with too few rewards and groups cut at
random are not judged and enter no share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..types import Group, GroupKind
from .advantage import Advantage
from .agents import by_agent
from .success import Success


def share_seen(group: Group) -> float:
    """Return the share of the siblings whose rewards are known, 0 to 1; pruned and failed ones are not."""
    siblings = group.siblings
    return sum(r.reward is not None for r in siblings) / len(siblings)


def are_equal(rewards: Sequence[float], atol: float) -> bool:
    """Whether the rewards lie within `atol` of each other (largest minus smallest); also without any."""
    return not rewards or max(rewards) - min(rewards) <= atol


@dataclass(frozen=True)
class GroupJudge:
    """Judges finished groups, for all parts of a run.

    With a group-relative `advantage` a group has no signal when every advantage is 0: all rewards equal within `atol`,
    or, under max@k, too few failures to matter. For other advantages (REINFORCE++, ReMax) equal rewards give the kind,
    but the group still teaches (`teaches`).
    """

    success: Success = field(default_factory=Success)
    atol: float = 1e-8
    advantage: Advantage | None = None
    """None: rewards alone decide."""

    def kind(self, group: Group) -> GroupKind:
        """Return the kind of a finished group; pruned and failed siblings are absent. The group keeps it."""
        if group.kind is None:
            group.kind = self._kind(group)
        return group.kind

    def _kind(self, group: Group) -> GroupKind:
        if not group.verdict.keep:
            return group.verdict.counts_as
        kinds = [self.of_rewards(of_one.known_rewards()) for of_one in by_agent([group])]
        best = (GroupKind.SIGNAL, GroupKind.UNKNOWN)
        kind = next((kind for kind in best if kind in kinds), GroupKind.NOT_JUDGED)  # by rewards, of the best agent
        if kind.zero_variance:
            return self._level(group, all)
        advantage = self.advantage
        if kind is not GroupKind.SIGNAL or advantage is None or not (advantage.group_relative and advantage.may_vanish):
            return kind
        advantages = advantage.of_batch(by_agent([group]))
        if any((np.abs(advantages_G) > 0).any() for advantages_G in advantages):  # NaN, an absent member, is not
            return kind
        return self._level(group, any)

    def of_rewards(self, rewards: Sequence[float]) -> GroupKind:
        """Return the kind by the known rewards alone, `UNKNOWN` when they are equal."""
        if len(rewards) < self.least:
            return GroupKind.NOT_JUDGED
        return GroupKind.UNKNOWN if are_equal(rewards, self.atol) else GroupKind.SIGNAL

    def _level(self, group: Group, enough: Callable[[list[bool | None]], bool]) -> GroupKind:
        """Return the kind of a group without signal: easy if `enough` (all or any) of its members are right."""
        right = [self.success.right(rollout) for rollout in group.siblings if rollout.reward is not None]
        if None in right:
            return GroupKind.UNKNOWN
        return GroupKind.EASY if enough(right) else GroupKind.HARD

    def teaches(self, group: Group) -> bool:
        """Whether an update on this group alone could have a gradient of the rewards."""
        if self.advantage is not None and not self.advantage.group_relative:
            return self.refusal(group) is None
        return self.kind(group) is GroupKind.SIGNAL

    def teaching_counts(self, size: int) -> np.ndarray:
        """Return bool [size + 1]: whether a group with so many right rollouts, of reward 1 among 0, has a signal."""
        teaches_R = np.ones(size + 1, bool)
        teaches_R[[0, -1]] = False
        advantage = self.advantage
        if advantage is None or not (advantage.group_relative and advantage.may_vanish):
            return teaches_R
        try:
            of_counts = [advantage(np.repeat([1.0, 0.0], [right, size - right])) for right in range(1, size)]
        except NotImplementedError:  # it needs more than rewards
            return teaches_R
        teaches_R[1:-1] = [(np.abs(advantages_G) > 0).any() for advantages_G in of_counts]
        return teaches_R

    def refusal(self, group: Group) -> str | None:
        """Return why no filter sees this group: it was cut, or has too few rewards. None: a filter decides."""
        if not group.verdict.keep:
            return group.verdict.reason
        for rollout in group.rollouts:
            if rollout.greedy and rollout.reward is None:
                return f"the greedy baseline has no reward ({rollout.reason})"
        if self.kind(group) is not GroupKind.NOT_JUDGED:
            return None
        present = max((len(of_one.known_rewards()) for of_one in by_agent([group])), default=0)
        return None if present >= self.least else f"only {present} of {len(group.siblings)} siblings have a reward"

    @property
    def least(self) -> int:
        """Rewards that a group needs to be judged, and to be trained on."""
        return 2 if self.advantage is None else self.advantage.smallest_group


BY_REWARDS = GroupJudge()
