"""verl's trajectories as Winnow's groups.

verl names a trajectory by prompt, session and part. A session is a rollout. It has one part, or several when its agent
loop returned several outputs, e.g. because it rewrote the history. The last part has the reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..env.rewards.scores import MAX_REWARD
from ..types import Fate, Group, Rollout, Segment, Visit

NO_TRAJECTORY = "verl has no trajectory of it: generation or reward raised an error, which is in verl's log"


@dataclass(frozen=True)
class Trajectory:
    """One output of a rollout. T: tokens after its prompt."""

    visit: int
    sibling: int
    part: int
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray
    """int64 [T]"""
    mask: np.ndarray
    """bool [T]: True where the model sampled the token."""
    reward: float
    """Sum of its token-level scores, before a KL penalty."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """What the reward function returned, by name."""


@dataclass(frozen=True)
class Launched:
    """A visit that verl rolls out, and the size of its group."""

    visit: Visit
    size: int


def groups_of(
    trajectories: Iterable[Trajectory], launched: Mapping[int, Launched], *, version: int, longest: int
) -> list[Group]:
    """Return a group for each visit that has trajectories; siblings without one have failed.

    `version`: policy version that sampled. `longest`: most tokens of a part. Raises ValueError on a visit that is not
    in flight.
    """
    parts: defaultdict[int, defaultdict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in trajectories:
        parts[trajectory.visit][trajectory.sibling].append(trajectory)
    if unknown := sorted(parts.keys() - launched.keys()):
        raise ValueError(f"verl returned rollouts of visits {unknown}, which are not in flight")
    groups = []
    for number, siblings in sorted(parts.items()):
        given = launched[number]
        rollouts = [_rollout(siblings[i], version, longest) for i in sorted(siblings)]
        missing = set(range(given.size)) - siblings.keys()
        rollouts += [failed_rollout(i) for i in missing]
        groups.append(Group(given.visit, sorted(rollouts, key=lambda r: r.sibling)))
    return groups


def as_filtered(group: Group) -> Group:
    """Return a group that verl's filter dropped with the best of its rewards for every sibling.

    The filter may compare a metric without what shapes rewards: `acc`, while a long answer costs reward.
    """
    best = max(group.known_rewards(), default=None)
    rollouts = [replace(r, reward=None if r.reward is None else best) for r in group.rollouts]
    return replace(group, rollouts=rollouts)


def without_tokens(sibling: int, **known: Any) -> Rollout:
    """Return a rollout whose tokens are unknown; `known`: its other fields."""
    ids, logp, versions = np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int32)
    return Rollout(sibling, (), ids, np.zeros(0, bool), logp, versions, **known)


def failed_rollout(sibling: int) -> Rollout:
    """Return a rollout of which verl has no trajectory."""
    return without_tokens(
        sibling, stop_reason="failed", fate=Fate.FAILED, reason=NO_TRAJECTORY, num_computed_tokens=None
    )


def _rollout(parts: Sequence[Trajectory], version: int, longest: int) -> Rollout:
    """Return the rollout of one session; its log-probabilities stay 0, as verl keeps them."""
    parts = sorted(parts, key=lambda trajectory: trajectory.part)
    last = parts[-1]
    mask = np.concatenate([part.mask for part in parts])
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)]).tolist()
    later = zip(starts[1:], parts[1:], strict=False)
    rollout = Rollout(
        sibling=last.sibling,
        prompt_ids=parts[0].prompt_ids,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        action_mask=mask,
        sampler_logp=np.zeros(len(mask), np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        stop_reason="length" if len(last.token_ids) >= longest else "eos",
        rewards={name: _number(value) for name, value in last.scores.items() if _is_number(value)},
        later_segments=[Segment(start, part.prompt_ids) for start, part in later],
        num_computed_tokens=None,
    )
    if abs(last.reward) <= MAX_REWARD:  # not NaN
        rollout.reward = float(last.reward)
    else:
        rollout.fate, rollout.reason = Fate.FAILED, f"the reward is not within +-{MAX_REWARD:g} ({last.reward})"
    return rollout


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.number | np.bool_)


def _number(value: Any) -> float | None:
    """Return a float; None where it is not finite, or too large for statistics."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_REWARD else None
