"""A baseline for each token: the mean reward of the siblings that share all tokens before it.

As the values of VinePPO (2410.01679) and SPO (2505.23564), but from the group's own rollouts, which share most of
their tokens: no token is sampled for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from winnow.learner import Learner, LearnerContext, Local, Policy
from winnow.learner.base import Stats
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.types import Rollout

Piece = tuple[int, float]
"""Index one past the tokens that have this baseline, and the baseline."""


@dataclass(frozen=True)
class TreeBaseline:
    """Train each token by the reward minus a mean over the other rollouts of the group that share the tokens before it.

    Where some siblings leave, the mean of those that stay is averaged with the baseline before, which counts for
    `prior` rollouts; after the last has left, the baseline stays. It depends neither on the token itself nor on what
    comes after it in the rollout, so the gradient stays unbiased.
    """

    prior: float = 2.0

    def build(self, policy: Policy, context: LearnerContext) -> TreeLearner:
        return TreeLearner(Local().build(policy, context), self)


class TreeLearner:
    """The local learner; a rollout is trained as one row for each part with a baseline of its own."""

    def __init__(self, local: Learner, options: TreeBaseline) -> None:
        self.local, self.options = local, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def accumulate(self, rows: Sequence[Row], loss: LossConfig, iteration: int = 0) -> Stats:
        return self.local.accumulate(cut(rows, self.options.prior), loss, iteration)


def cut(rows: Sequence[Row], prior: float) -> list[Row]:
    """Return the rows to train. Rows that share a rollout, or have a teacher, are trained as they are."""
    found: list[Row] = []
    for _, group in groupby(rows, key=lambda row: row.rollout.prompt_ids):
        members = list(group)
        if any(row.rollout_number is not None or row.pool is not None for row in members):
            raise ValueError("prototypes/tree_baseline.py takes rollouts of one segment, with advantage: rloo")
        rewards = [row.rollout.reward or 0.0 for row in members]
        baselines = token_baselines([row.rollout.token_ids for row in members], rewards, prior)
        for row, pieces in zip(members, baselines, strict=True):
            found += _parts(row, pieces, number=-1 - len(found))
    return found


def token_baselines(tokens_G: Sequence[np.ndarray], rewards_G: Sequence[float], prior: float) -> list[list[Piece]]:
    """Return each rollout's pieces, in order; a rollout without a sibling has its own reward as baseline."""
    return [_pieces(i, tokens_G, rewards_G, prior) for i in range(len(tokens_G))]


def _pieces(i: int, tokens_G: Sequence[np.ndarray], rewards_G: Sequence[float], prior: float) -> list[Piece]:
    own = tokens_G[i]
    # until which token a sibling's tokens before it are the same
    last = {j: min(common_prefix(own, other), len(other) - 1) for j, other in enumerate(tokens_G) if j != i}
    pieces: list[Piece] = []
    baseline = float(np.mean([rewards_G[j] for j in last])) if last else float(rewards_G[i])
    for end in sorted(set(last.values())):
        if pieces:
            there = [rewards_G[j] for j in last if last[j] >= end]
            baseline = (prior * baseline + sum(there)) / (prior + len(there))
        pieces.append((end + 1, baseline))
    if not pieces or pieces[-1][0] < len(own):
        pieces.append((len(own), baseline))
    return pieces


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    n = min(len(one), len(other))
    differs = np.flatnonzero(one[:n] != other[:n])
    return int(differs[0]) if len(differs) else n


def _parts(row: Row, pieces: Sequence[Piece], number: int) -> list[Row]:
    """Return a row for each baseline. All count as one rollout, whose ratio is over all of them."""
    rollout, parts, start = row.rollout, [], 0
    assert rollout.reward is not None
    for (end, baseline), after in zip(pieces, [*pieces[1:], None], strict=True):
        if after is not None and after[1] == baseline:
            continue
        mask = rollout.action_mask & (np.arange(len(rollout.token_ids)) >= start)
        if mask[:end].any():
            part = replace(row, rollout=_only(rollout, mask, end), advantage=rollout.reward - baseline)
            parts.append(replace(part, rollout_number=number))
        start = end
    return parts


def _only(rollout: Rollout, mask: np.ndarray, end: int) -> Rollout:
    """Return the rollout's tokens before `end`, with the actions of the mask."""
    return replace(
        rollout,
        token_ids=rollout.token_ids[:end],
        action_mask=mask[:end],
        sampler_logp=np.where(mask, rollout.sampler_logp, np.float32(0))[:end],
        versions=np.where(mask, rollout.versions, np.int32(-1))[:end],
        turns=[],
        raw_logp=None,
    )
