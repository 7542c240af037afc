"""Build finished groups and rollouts without a model."""

from __future__ import annotations

import numpy as np

from winnow.types import Fate, Group, Prompt, Rollout, Visit


def make_rollout(sibling: int, length: int, reward: float | None, *, version: int = 0, env_tokens: int = 0) -> Rollout:
    mask = np.ones(length, bool)
    mask[:env_tokens] = False
    return Rollout(
        sibling=sibling,
        prompt_ids=(5, 6, 7),
        token_ids=np.arange(length, dtype=np.int64) + 10,
        action_mask=mask,
        sampler_logp=-np.ones(length, np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        fate=None if reward is not None else Fate.FAILED,
    )


def make_group(number: int, rewards: list[float | None], lengths: list[int] | None = None, version: int = 0) -> Group:
    lengths = lengths or [4] * len(rewards)
    visit = Visit(number, 0, Prompt(f"p{number}", number, text="x"))
    return Group(
        visit, [make_rollout(i, n, r, version=version) for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))]
    )
