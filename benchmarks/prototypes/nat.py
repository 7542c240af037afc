"""NAT (2603.06619): train a random prefix of each rollout, each token weighted by 1 / P(the prefix reaches it)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from winnow.base.noise import noise_key, uniform_array
from winnow.learner import Learner, LearnerContext, Local, Policy
from winnow.learner.base import Stats
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.types import Rollout

NAT_STREAM = 101


@dataclass(frozen=True)
class Nat:
    """Train all of a rollout with probability `whole`, else only the first `share` of its tokens.

    The tokens after the first `share` count 1 / `whole` times, so the expected gradient is that of whole rollouts. NAT
    draws the length of the prefix from many; two keep the largest weight at 1 / `whole`, and need one row each.
    """

    share: float = 0.5
    whole: float = 0.5

    def build(self, policy: Policy, context: LearnerContext) -> PrefixLearner:
        return PrefixLearner(Local().build(policy, context), self)


class PrefixLearner:
    """The local learner, given prefixes.

    A correction of whole rollouts sees only the prefix of a cut one. The gradient is therefore unbiased on policy, or
    with ratios of tokens.
    """

    def __init__(self, local: Learner, options: Nat) -> None:
        self.local, self.options = local, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def accumulate(self, rows: Sequence[Row], loss: LossConfig, iteration: int = 0) -> Stats:
        key = noise_key(torch.initial_seed(), NAT_STREAM)  # each step seeds torch by the run's seed and its number
        whole_R = uniform_array(key, np.arange(len(rows))) < self.options.whole
        return self.local.accumulate(prefixes(rows, whole_R, self.options), loss, iteration)


def prefixes(rows: Sequence[Row], whole_R: np.ndarray, options: Nat) -> list[Row]:
    """Return the rows to train: of a whole rollout both parts, of another the first.

    Rows that share a rollout or a baseline, or have a teacher, are trained as they are.
    """
    found: list[Row] = []
    for number, (row, whole) in enumerate(zip(rows, whole_R, strict=True)):
        end = end_of_prefix(row, options.share)
        if row.rollout_number is not None or row.pool is not None or row.teacher_logp is not None or end is None:
            found.append(row)
            continue
        first, rest = parted(row, end, number)
        found.append(first)
        if whole:
            found.append(replace(rest, weight=row.weight / options.whole))
    return found


def end_of_prefix(row: Row, share: float) -> int | None:
    """Return the index one past the first `share` of a row's action tokens; None: nothing comes after it."""
    actions = np.flatnonzero(row.rollout.action_mask)
    kept = math.ceil(share * len(actions))
    return int(actions[kept - 1]) + 1 if 0 < kept < len(actions) else None


def parted(row: Row, end: int, number: int) -> tuple[Row, Row]:
    """Return a row of the tokens before `end`, and one of all tokens whose actions are those from `end` on.

    `number`: of the row in its batch. Both parts count as one rollout, whose ratio is over both.
    """
    rollout = row.rollout
    first = with_actions(rollout, rollout.action_mask, end)
    after = rollout.action_mask & (np.arange(len(rollout.token_ids)) >= end)
    rest = with_actions(rollout, after, len(after))
    own_number = -1 - number  # the numbers of rollouts with several segments are not negative
    return replace(row, rollout=first, rollout_number=own_number), replace(row, rollout=rest, rollout_number=own_number)


def with_actions(rollout: Rollout, mask_T: np.ndarray, end: int) -> Rollout:
    """Return the rollout's tokens before `end`, of whose actions only those of the mask, bool [T], are left."""
    return replace(
        rollout,
        token_ids=rollout.token_ids[:end],
        action_mask=mask_T[:end],
        sampler_logp=np.where(mask_T, rollout.sampler_logp, np.float32(0))[:end],
        versions=np.where(mask_T, rollout.versions, np.int32(-1))[:end],
        turns=[],
        raw_logp=None,
    )
