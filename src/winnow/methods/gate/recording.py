"""Rows for `winnow gate`: a gate's view of groups that ran to their end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pvariance
from typing import Any

from ...types import Fate, Group, GroupKind, Rollout, Turn
from ..group_kind import BY_REWARDS, GroupJudge
from .signals import SIGNALS


def rows_of(group: Group, steps: Sequence[int], judge: GroupJudge = BY_REWARDS) -> list[dict[str, Any]]:
    """Return the table rows of one finished group: one for each of `steps`.

    The group must have run to its end: under no gate, or under gates of whole groups whose cuts are audited. Then it
    represents `weight` = 1 / (its chance to get this far) groups. A sibling that was pruned or failed is absent: from
    rewards and steps altogether, and from the signals at step k unless it had taken k steps by then, as a gate in the
    run saw it. `reward_var` is 0 where `judge`, the run's, sees no signal. Raises ValueError when another member has no
    reward, when fewer than two have one, or when members had unequal chances, which leaves the group's own unknown.
    """
    members, visit = group.siblings, f"visit {group.visit.number}"
    ended = [r for r in members if r.reward is not None]
    if any(r.reward is None and r.fate not in (Fate.PRUNED, Fate.FAILED) for r in members):
        raise ValueError(f"{visit}: a member has no reward (its group was stopped), so it tells nothing")
    if len(ended) < 2:
        raise ValueError(f"{visit}: fewer than two members have a reward, so it tells nothing")
    chances = {r.survival_p for r in members}
    if len(chances) > 1:
        raise ValueError(f"{visit}: its members had unlike chances to come to their end")
    rewards = [float(r.reward) for r in ended if r.reward is not None]
    taken = [len(_steps(r)) for r in ended]
    shared = {
        "task_id": f"{group.prompt.id}/{group.visit.epoch}",
        "task_type": str(group.prompt.columns.get("task_type", "")),
        "reward_var": pvariance(rewards) if judge.kind(group) is GroupKind.SIGNAL else 0.0,  # exact: ranked with ties
        "steps": sum(taken),
        "weight": 1 / chances.pop(),
    }
    rows = []
    for k in steps:
        seen = [_steps(r) for r in members if r.reward is not None or len(_steps(r)) >= k]
        actions = [[t.compared for t in steps] for steps in seen]
        observations = [[t.observation or "" for t in steps] for steps in seen]
        signals = {name: f(actions, observations, k) for name, f in SIGNALS.items()}
        rows.append({"K": k, **shared, "steps_k": sum(min(n, k) for n in taken)} | signals)
    return rows


def _steps(rollout: Rollout) -> list[Turn]:
    return [turn for turn in rollout.turns if turn.taken]
