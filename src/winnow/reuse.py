"""Reuse: groups that were trained join later batches in the place of fresh ones, so that a token is paid once and used
several times.

A group leaves after `updates` updates, when it is older than `max_age` policy versions, or when the effective sample
size of its own rollouts falls under `min_ess`: then the policy has moved away from the one that sampled it. The batch
keeps its size. `num_iterations` is the same within one step, without the check.

The policy has seen the tokens of a reused group, so that their importance ratios no longer are those of a fresh draw.
An audit rolls out the prompts of some groups once more and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt

from .base.noise import noise_key
from .base.state import State
from .config.options import ReuseConfig, new_groups
from .methods.correct import effective_sample_size
from .methods.group_kind import GroupJudge
from .methods.lag_bands import LAG_BANDS, band_of
from .sampler.buffer import oldest_version
from .sampler.codec import group_state
from .types import Group, Job, Rollout, Visit

REUSE_STREAM = 9
RollOut = Callable[[Sequence[Job]], list[Group]]
LogRatios = Callable[[Sequence[Group]], list[np.ndarray]]
"""Returns log(current policy / sampler) of each rewarded rollout, float64, an array a group."""


class UsedState(State):
    group: dict[str, Any]
    uses: PositiveInt


@dataclass
class Used:
    group: Group
    uses: int
    """Updates that it was part of."""

    def age(self, version: int) -> int:
        oldest = oldest_version(self.group)
        return 0 if oldest is None else version - oldest


@dataclass
class Reuse:
    """The groups that may be trained again, oldest first."""

    config: ReuseConfig
    prompts_per_step: int
    seed: int
    judge: GroupJudge
    log_ratios: LogRatios
    roll_out: RollOut
    """Runs jobs under the current policy."""
    groups: list[Used] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step."""
    audited: list[Rollout] = field(default_factory=list)
    """Rollouts that the audit of the step took."""
    joined: list[Used] = field(default_factory=list)
    """Groups of the current update."""

    @property
    def fewest_fresh(self) -> int:
        """New groups of a batch in which every other one is reused."""
        return new_groups(self.prompts_per_step, self.config)

    def for_step(self, version: int) -> list[Group]:
        """Return the groups that join the update from policy `version`; drop those that no longer may."""
        young = [used for used in self.groups if used.age(version) <= self.config.max_age]
        log_w = self.log_ratios([used.group for used in young])
        ess = [_ess(log_w_G) for log_w_G in log_w]
        stays = [share >= self.config.min_ess for share in ess]
        self.metrics = {
            "reuse/left_by_age": float(len(self.groups) - len(young)),
            "reuse/left_by_ess": float(stays.count(False)),
        }
        by: dict[str, list[float]] = {}
        bands = band_of(np.array([used.age(version) for used in young], np.int64)).tolist()
        for used, share, band in zip(young, ess, bands, strict=True):
            for name in (f"use_{used.uses + 1}", f"age_{[*LAG_BANDS][band]}"):
                by.setdefault(name, []).append(share)
        self.metrics |= {f"reuse/ess/{name}": float(np.mean(shares)) for name, shares in sorted(by.items())}
        near = [(used, log_w_G) for used, log_w_G, stay in zip(young, log_w, stays, strict=True) if stay]
        self.groups = [used for used, _ in near]
        # The least used first, or the same groups would be trained several times in a row.
        near.sort(key=lambda each: each[0].uses)
        joining = near[: self.prompts_per_step - self.fewest_fresh]
        self.joined = [used for used, _ in joining]
        self.metrics |= _figures(self.joined, version)
        self._audit([(used.group, log_w_G) for used, log_w_G in joining], version)
        return [used.group for used in self.joined]

    def _audit(self, joining: Sequence[tuple[Group, np.ndarray]], version: int) -> None:
        """Roll out a share of the prompts once more; compare the mean reward with that by importance ratios."""
        self.audited = []
        draws = np.random.default_rng(noise_key(self.seed, REUSE_STREAM, version)).random(len(joining))
        chosen = [each for each, draw in zip(joining, draws, strict=True) if draw < self.config.audit]
        if not chosen:
            return
        visits = [Visit(number, version, group.visit.prompt) for number, (group, _) in enumerate(chosen)]
        sizes = [len(_rewarded(group)) for group, _ in chosen]
        fresh = self.roll_out([Job(visit, size, "profile") for visit, size in zip(visits, sizes, strict=True)])
        self.audited = [rollout for group in fresh for rollout in group.rollouts]
        gaps = []
        for (group, log_w_G), again in zip(chosen, fresh, strict=True):
            if self.judge.teaches(again):  # as the old one does: others are not used again
                old = _rewarded(group)
                values, weights = [r.reward for r in old], [1 / r.survival_p for r in old]
                estimate = np.average(np.exp(log_w_G) * values, weights=weights)
                gaps.append(float(estimate - np.mean(again.known_rewards())))
        if gaps:
            self.metrics |= {"reuse/audit/groups": float(len(gaps)), "reuse/audit/bias": float(np.mean(gaps))}

    def trained(self, fresh: Sequence[Group]) -> None:
        """Count the update on new groups and on those that joined it."""
        for used in self.joined:
            used.uses += 1
        self.groups = [used for used in self.groups if used.uses < self.config.updates]
        self.groups += [Used(group, 1) for group in fresh if self.judge.teaches(group)]

    def state_dict(self) -> list[dict[str, Any]]:
        return [{"group": group_state(used.group), "uses": used.uses} for used in self.groups]

    def load(self, groups: Sequence[Group], uses: Sequence[int]) -> None:
        """Take over the groups of a state. Raises ValueError on counts that this configuration cannot have."""
        if any(count >= self.config.updates for count in uses):
            raise ValueError(f"a group was used as often as reuse.updates={self.config.updates} allows, or more")
        self.groups = [Used(group, count) for group, count in zip(groups, uses, strict=True)]


def _rewarded(group: Group) -> list[Rollout]:
    return [rollout for rollout in group.siblings if rollout.reward is not None]


def _ess(log_w_G: np.ndarray) -> float:
    """Return the effective sample size of a group's rollouts over their number."""
    if not (log_w_G > -np.inf).any():
        return 0.0
    return effective_sample_size(torch.from_numpy(log_w_G)) / len(log_w_G)


def _figures(joining: Sequence[Used], version: int) -> dict[str, float]:
    metrics = {"reuse/groups": float(len(joining))}
    rollouts = [rollout for used in joining for rollout in used.group.rollouts]
    metrics["reuse/tokens"] = float(sum(int(rollout.action_mask.sum()) for rollout in rollouts))
    if joining:
        metrics["reuse/uses_mean"] = float(np.mean([used.uses for used in joining]))
        metrics["reuse/age_mean"] = float(np.mean([used.age(version) for used in joining]))
    return metrics
