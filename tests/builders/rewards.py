"""Build groups scored by reward functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from winnow.env.rewards.rewarder import Rewarder
from winnow.types import Group, Prompt, Rollout, Visit


def rollout(sibling: int, text: str, **fields) -> Rollout:
    n = 2
    return Rollout(
        sibling=sibling,
        prompt_ids=(1,),
        token_ids=np.array([sibling, 7]),
        action_mask=np.ones(n, bool),
        sampler_logp=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        text=text,
        **fields,
    )


def group(*texts: str, number: int = 0, chat: bool = False, **columns) -> Group:
    asked = {"messages": ({"role": "user", "content": "why?"},)} if chat else {"text": "why?"}
    prompt = Prompt(f"p{number}", number, columns=columns, **asked)
    return Group(Visit(number, 0, prompt), [rollout(i, text) for i, text in enumerate(texts)])


def score_all(rewarder: Rewarder, groups: Sequence[Group]) -> None:
    """Score groups and wait for all of them."""
    for each in groups:
        rewarder.start(each)
    waiting = {id(each) for each in groups}
    while waiting:
        waiting -= {id(each) for each in rewarder.done(wait=True)}


def scored(reward_funcs, *groups: Group, weights=None, **options) -> Rewarder:
    rewarder = Rewarder(reward_funcs, weights, **options)
    try:
        score_all(rewarder, groups)
    finally:
        rewarder.close()
    return rewarder
