"""Rollouts of agents with rewards of their own: an agent's segments are compared with its own in the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..types import Group, Rollout, Segment


def by_agent(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with one group per agent where agents have rewards of their own; others as they are.

    An agent without a reward in the greedy baseline rollout has no group.
    """
    found: list[Group] = []
    for group in groups:
        names = dict.fromkeys([name for rollout in group.rollouts for name in rollout.agent_rewards])
        if not names:
            found.append(group)
        for name in names:
            rollouts = [of_agent(rollout, name) for rollout in group.rollouts]
            if all(rollout.reward is not None for rollout in rollouts if rollout.greedy):
                found.append(replace(group, rollouts=rollouts, kind=None))
    return found


def of_agent(rollout: Rollout, name: str) -> Rollout:
    """Return an agent's segments as a rollout with its reward; without a reward if it sampled nothing.

    The reward of a rollout without rewards by agent, e.g. a truncated one, is that of all its agents.
    """
    parts = [part for part in rollout.parts() if part.agent == name]
    if rollout.reward is None or not parts:
        return replace(rollout, reward=None, agent_rewards={})
    starts = np.cumsum([0, *[len(part.token_ids) for part in parts[:-1]]]).tolist()
    segments = [Segment(start, part.prompt_ids, name) for start, part in zip(starts, parts, strict=True)]
    return replace(
        parts[0],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        action_mask=np.concatenate([part.action_mask for part in parts]),
        sampler_logp=np.concatenate([part.sampler_logp for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        reward=rollout.agent_rewards.get(name) if rollout.agent_rewards else rollout.reward,
        agent_rewards={},
        later=segments[1:],
    )
