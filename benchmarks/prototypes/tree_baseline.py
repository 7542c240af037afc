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
from prototypes.nat import with_actions

from winnow.env.chat import common_prefix
from winnow.learner import Learner, LearnerContext, Local, Policy
from winnow.learner.base import Stats
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig

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
    """Return the rows to train. Raises ValueError on several segments, baselines of the update, and a teacher."""
    found: list[Row] = []
    for _, group in groupby(rows, key=lambda row: row.rollout.prompt_ids):
        members = list(group)
        special = [value for row in members for value in (row.rollout_number, row.pool, row.teacher_logp)]
        if any(value is not None for value in special):
            raise ValueError(
                "tree_baseline.py takes rollouts of one segment, with advantage: rloo and without a teacher"
            )
        rewards = [row.rollout.reward for row in members if row.rollout.reward is not None]  # as all of `rows_of` have
        baselines = token_baselines([row.rollout.token_ids for row in members], rewards, prior)
        for row, pieces in zip(members, baselines, strict=True):
            found += _parts(row, pieces, number=-1 - len(found))
    return found


def token_baselines(tokens_G: Sequence[np.ndarray], rewards_G: Sequence[float], prior: float) -> list[list[Piece]]:
    """Return each rollout's pieces, in order; a rollout without a sibling has its own reward as baseline.

    `tokens_G`: int64 [T] of each rollout. A piece starts where the one before ends; the last may end after the rollout.
    """
    return [_pieces(i, tokens_G, rewards_G, prior) for i in range(len(tokens_G))]


def _pieces(i: int, tokens_G: Sequence[np.ndarray], rewards_G: Sequence[float], prior: float) -> list[Piece]:
    own = tokens_G[i]
    # of each sibling: the last token before which both have the same tokens
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


def _parts(row: Row, pieces: Sequence[Piece], number: int) -> list[Row]:
    """Return a row for each baseline. All count as one rollout, whose ratio is over all of them."""
    rollout, parts, start = row.rollout, [], 0
    assert rollout.reward is not None
    for (end, baseline), after in zip(pieces, [*pieces[1:], None], strict=True):
        if after is not None and after[1] == baseline:
            continue
        mask = rollout.action_mask & (np.arange(len(rollout.token_ids)) >= start)
        if mask[:end].any():
            part = replace(row, rollout=with_actions(rollout, mask, end), advantage=rollout.reward - baseline)
            parts.append(replace(part, rollout_number=number))
        start = end
    return parts
