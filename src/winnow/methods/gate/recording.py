"""What a gate could have gone by, of groups that came to their end: the rows that `winnow gate` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...types import Group
from .signals import SIGNALS


def rows_of(group: Group, steps: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of one finished group for such a table: one for each of `steps`.

    The group must have run to its end: under no gate, or under gates of whole groups whose cuts are audited. Then it
    stands for `weight` = 1 / (its chance to come so far) groups. Raises ValueError when a member has no reward, and
    when members had unlike chances, as under a gate that stops single siblings: the group's own is not known then.
    """
    members = group.siblings
    rewards_G = np.array([np.nan if r.reward is None else r.reward for r in members])
    if np.isnan(rewards_G).any():
        raise ValueError(f"visit {group.visit.number}: a member has no reward (stopped or failed), so it tells nothing")
    chances = {r.survival_p for r in members}
    if len(chances) > 1:
        raise ValueError(f"visit {group.visit.number}: its members had unlike chances to come to their end")
    actions = [[t.action if t.canonical is None else t.canonical for t in r.turns] for r in members]
    observations = [[t.observation or "" for t in r.turns] for r in members]
    taken = [len(a) for a in actions]
    shared = {
        "task_id": f"{group.prompt.id}/{group.visit.epoch}",
        "task_type": str(group.prompt.columns.get("task_type", "")),
        "reward_var": float(rewards_G.var()) if np.ptp(rewards_G) > 1e-8 else 0.0,
        "steps": sum(taken),
        "weight": 1 / chances.pop(),
    }
    return [
        {"K": k, **shared, "steps_k": sum(min(n, k) for n in taken)}
        | {name: f(actions, observations, k) for name, f in SIGNALS.items()}
        for k in steps
    ]
