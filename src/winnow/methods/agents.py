"""Rollouts of agents with rewards of their own: an agent's segments are compared with its own in the group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..types import LIMITS, Fate, Group, Rollout, Segment


def by_agent(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with one group per agent where agents have rewards of their own; others as they are.

    An agent without a reward in the greedy baseline rollout has no group.
    """
    by_agents: list[Group] = []
    for group in groups:
        names = dict.fromkeys([name for rollout in group.rollouts for name in rollout.agent_rewards])
        if not names:
            by_agents.append(group)
        for name in names:
            rollouts = [of_agent(rollout, name) for rollout in group.rollouts]
            if all(rollout.reward is not None for rollout in rollouts if rollout.greedy):
                by_agents.append(replace(group, rollouts=rollouts, kind=None))
    return by_agents


def agents_of(rollout: Rollout) -> list[str]:
    """Return the names of the agents that sampled tokens, in order of their first segments."""
    return list(dict.fromkeys(part.agent for part in rollout.parts() if part.action_mask.any()))


def named(agents: Iterable[str]) -> str:
    """Return names of agents for a message."""
    return ", ".join(repr(name) if name else "'' (without a name)" for name in agents)


def rewarded_agents(group: Group) -> set[str]:
    """Return the agents of a group that have a reward of their own; empty: one reward is that of all."""
    return {name for rollout in group.rollouts for name in rollout.agent_rewards}


def filter_without_row(group: Group, *, mask_truncated: bool) -> None:
    """Mark rollouts that have no row in an update as filtered: no token of them is trained."""
    names = rewarded_agents(group)
    for rollout in group.rollouts:
        reason = ""
        if mask_truncated and rollout.truncated:
            reason = f"cut at {LIMITS[rollout.stop_reason]}; mask_truncated_completions leaves it out of the loss"
        elif names and (set(rollout.agent_rewards) or names).isdisjoint(agents_of(rollout)):
            reason = "only agents that sampled nothing have a reward"
        if rollout.fate is None and reason:
            rollout.fate, rollout.reason = Fate.FILTERED, reason


def unrewarded_tokens(rollout: Rollout, names: set[str]) -> int:
    """Return the number of tokens sampled as agents without a reward, where others have one: none is trained.

    `names`: `rewarded_agents` of its group.
    """
    if not names:
        return 0
    parts = [part for part in rollout.parts() if part.agent not in (rollout.agent_rewards or names)]
    return sum(int(np.count_nonzero(part.action_mask)) for part in parts)


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
        later_segments=segments[1:],
    )
