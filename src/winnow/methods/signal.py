"""The one answer to "has this group a signal?": asked by tally, selectors, filters, loop and ledger alike.

A group is judged by the rewards that its advantage uses, with a tolerance (`Judge`). A group that a gate cut has no
rewards; it counts as the kind that it was cut for. A group with too few rewards is evidence of nothing, and so is one
that was cut at random: neither is in any share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from ..types import Group, Verdict, Visit
from .advantage import Advantage
from .success import Success


class Kind(StrEnum):
    """Kind of a finished group: what it can teach."""

    SIGNAL = "signal"
    """Some advantage is not 0."""
    EASY = "easy"
    """No signal, and every member is right (`Success`)."""
    HARD = "hard"
    """No signal, and some member is wrong; or cut, because nobody came anywhere."""
    UNKNOWN = "unknown"
    """No signal, and whether easy or hard is not known: cut, because all members did the same, or what counts as right
    is undecided."""
    NOT_JUDGED = "not judged"
    """Too few rewards to tell (failures), or cut for no evidence (the control arm)."""

    @property
    def zero_variance(self) -> bool:
        """Whether the group was judged, and teaches nothing."""
        return self in (Kind.EASY, Kind.HARD, Kind.UNKNOWN)


CUT_FOR = {"converged": Kind.UNKNOWN, "stuck": Kind.HARD}
"""First words of a cut's reason -> kind that the group counts as; any other reason is no evidence."""


def kind_of_cut(verdict: Verdict) -> Kind:
    """Kind of a group that was cut with this verdict."""
    return CUT_FOR.get(verdict.reason.partition(":")[0], Kind.NOT_JUDGED)


def forced(visit: Visit) -> bool:
    """Whether an audit rolled this visit out against its selector's will."""
    return visit.verdict.overridden is not None


def share_seen(group: Group) -> float:
    """Share of the siblings whose rewards are known, 0 to 1; pruned and failed ones are not."""
    siblings = group.siblings
    return sum(r.reward is not None for r in siblings) / len(siblings)


def is_zero_variance(rewards_G: np.ndarray, atol: float = 1e-8) -> bool:
    """Whether all present rewards lie within `atol` of each other (largest minus smallest <= atol).

    float [G]; NaN members are absent. Tested on the rewards that the advantage uses, so with a format bonus a mix of
    0 and 0.1 is not zero-variance. No member present counts as zero-variance.
    """
    present = rewards_G[~np.isnan(rewards_G)]
    return len(present) == 0 or bool(present.max() - present.min() <= atol)


@dataclass(frozen=True)
class Judge:
    """The judge of a finished group's kind, which selectors, filters and statistics of a run go by.

    With a group-relative `advantage` there is no signal when every advantage is 0: all rewards equal within `atol`, or,
    under max@k, too few failures to matter. For other advantages (REINFORCE++, ReMax) equal rewards give the kind, but
    the group teaches all the same (`teaches`).
    """

    success: Success = field(default_factory=Success)
    atol: float = 1e-8
    advantage: Advantage | None = None
    """None: rewards alone decide."""

    def kind(self, group: Group) -> Kind:
        """Kind of a group as it is: pruned and failed siblings are absent."""
        if not group.verdict.keep:
            return kind_of_cut(group.verdict)
        kind = self.of_rewards(group.rewards())
        if kind.zero_variance:
            return self._level(group, all)
        if kind is not Kind.SIGNAL or self.advantage is None or not self.advantage.group_relative:
            return kind
        if (np.abs(self.advantage.of_batch([group])[0]) > 0).any():  # NaN, an absent member, is not
            return kind
        return self._level(group, any)

    def of_rewards(self, rewards_G: np.ndarray) -> Kind:
        """Kind by rewards alone, `UNKNOWN` when they are equal: float [G], NaN where a member is absent."""
        if np.count_nonzero(~np.isnan(rewards_G)) < self.least:
            return Kind.NOT_JUDGED
        return Kind.UNKNOWN if is_zero_variance(rewards_G, self.atol) else Kind.SIGNAL

    def _level(self, group: Group, enough: Callable[[list[bool | None]], bool]) -> Kind:
        """Kind of a group without signal: easy if `enough` (all or any) of its members are right."""
        right = [self.success.right(rollout) for rollout in group.siblings if rollout.reward is not None]
        if None in right:
            return Kind.UNKNOWN
        return Kind.EASY if enough(right) else Kind.HARD

    def teaches(self, group: Group) -> bool:
        """Whether an update on this group alone could have a gradient of the rewards."""
        if self.advantage is not None and not self.advantage.group_relative:
            return self.refusal(group) is None
        return self.kind(group) is Kind.SIGNAL

    def refusal(self, group: Group) -> str | None:
        """Why no filter is asked about this group: it was cut, or an advantage lacks members. None: it is complete."""
        if not group.verdict.keep:
            return group.verdict.reason
        for rollout in group.rollouts:
            if rollout.greedy and rollout.reward is None:
                return f"the greedy baseline has no reward ({rollout.reason})"
        present = sum(r.reward is not None for r in group.siblings)
        return None if present >= self.least else f"only {present} of {len(group.siblings)} siblings have a reward"

    @property
    def least(self) -> int:
        """Rewards that a group needs to be judged, and to be trained on."""
        return 2 if self.advantage is None else self.advantage.smallest_group


BY_REWARDS = Judge()
