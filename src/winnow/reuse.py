"""Reuse: groups that were trained join later batches in the place of fresh ones, so that a token is paid once and used
several times.

A group leaves after `updates` updates, when it is older than `max_age` policy versions, or when the effective sample
size of its own rollouts falls under `min_ess`: then the policy has moved away from the one that sampled it. The batch
keeps its size. `num_iterations` is the same within one step, without the check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt

from .base.sections import ReuseConfig
from .base.state import State
from .learner.base import Learner
from .learner.off_policy import ess_ratio, log_weights
from .learner.rows import rows_of_rollout
from .methods.group_kind import GroupJudge
from .sampler.buffer import oldest_version
from .sampler.codec import Prompts, group_from, group_state
from .types import Group, Purpose


class UsedState(State):
    group: dict[str, Any]
    uses: PositiveInt


@dataclass
class Used:
    group: Group
    uses: int
    """Updates that it was part of."""


@dataclass
class Reuse:
    """The groups that may be trained again, oldest first."""

    config: ReuseConfig
    prompts_per_step: int
    learner: Learner
    judge: GroupJudge
    groups: list[Used] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step."""

    @property
    def fewest_fresh(self) -> int:
        """Fresh groups of a batch in which every other one is reused."""
        return -(-self.prompts_per_step // self.config.updates)

    def for_step(self, version: int) -> list[Group]:
        """Return the groups that join the update from policy `version`; those that may no longer leave. One forward
        pass over all."""
        young = [used for used in self.groups if version - _version(used.group, version) <= self.config.max_age]
        ess = ess_of([used.group for used in young], self.learner)
        near = [used for used, share in zip(young, ess, strict=True) if share >= self.config.min_ess]
        self.metrics = {
            "reuse/left_by_age": float(len(self.groups) - len(young)),
            "reuse/left_by_ess": float(len(young) - len(near)),
        }
        for uses in sorted({used.uses for used in young}):
            shares = [share for used, share in zip(young, ess, strict=True) if used.uses == uses]
            self.metrics[f"reuse/ess/use_{uses + 1}"] = float(np.mean(shares))
        self.groups = near
        # The least used first, or the same groups would be trained several times in a row.
        joining = sorted(near, key=lambda used: used.uses)[: self.prompts_per_step - self.fewest_fresh]
        self.metrics |= _figures(joining, version)
        return [used.group for used in joining]

    def trained(self, fresh: Sequence[Group], again: Sequence[Group]) -> dict[str, float]:
        """Count an update on new groups and on those that joined it; return the metrics of the step."""
        joined = {group.visit.number for group in again}
        for used in self.groups:
            used.uses += used.group.visit.number in joined
        self.groups = [used for used in self.groups if used.uses < self.config.updates]
        self.groups += [Used(group, 1) for group in fresh if self.judge.teaches(group)]
        return self.metrics

    def state_dict(self) -> list[dict[str, Any]]:
        return [{"group": group_state(used.group), "uses": used.uses} for used in self.groups]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], prompts: Mapping[Purpose, Prompts]) -> None:
        """Restore a state. Raises ValueError on one that this configuration cannot have."""
        saved = [UsedState.of(each) for each in state]
        if any(each.uses >= self.config.updates for each in saved):
            raise ValueError(f"a group was used as often as reuse.updates={self.config.updates} allows, or more")
        self.groups = [Used(group_from(each.group, prompts), each.uses) for each in saved]


def ess_of(groups: Sequence[Group], learner: Learner) -> list[float]:
    """Return, for each group, the effective sample size of its rollouts under the current policy over their number."""
    rollouts = [[r for r in group.siblings if r.reward is not None] for group in groups]
    every = list(chain.from_iterable(rollouts))
    rows = [row for number, rollout in enumerate(every) for row in rows_of_rollout(rollout, number=number)]
    log_w = iter(log_weights(rows, learner).tolist()) if rows else iter(())
    return [_ess([next(log_w) for _ in of_group]) for of_group in rollouts]


def _ess(log_w: list[float]) -> float:
    return ess_ratio(torch.tensor(log_w, dtype=torch.float64)) if max(log_w, default=-np.inf) > -np.inf else 0.0


def _version(group: Group, version: int) -> int:
    oldest = oldest_version(group)
    return version if oldest is None else oldest


def _figures(joining: Sequence[Used], version: int) -> dict[str, float]:
    found = {"reuse/groups": float(len(joining))}
    rollouts = [rollout for used in joining for rollout in used.group.rollouts]
    found["reuse/tokens"] = float(sum(int(rollout.action_mask.sum()) for rollout in rollouts))
    if joining:
        found["reuse/uses_mean"] = float(np.mean([used.uses for used in joining]))
        found["reuse/age_mean"] = float(np.mean([version - _version(used.group, version) for used in joining]))
    return found
