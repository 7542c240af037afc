"""Rows of an update: the segments of the rollouts that a loss is a mean of, each with an advantage and a weight.

Rows are weighted over the whole optimizer batch (the token reduction). Rows without a gradient are then dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..methods.advantage import Advantage, InUpdate
from ..methods.advantage.in_update import Weighing
from ..methods.loss import LossConfig, LossType
from ..types import Group, Rollout


@dataclass(frozen=True)
class Pool:
    """Rows that share a baseline which the update computes."""

    number: int
    weighing: Weighing


@dataclass(frozen=True)
class Row:
    """One segment of a rollout as the loss sees it."""

    rollout: Rollout
    """The segment alone (`Rollout.parts`)."""
    advantage: float
    weight: float
    """Coefficient of each of its tokens in the loss."""
    pool: Pool | None = None
    """Pool over which the update computes the baseline. `advantage` is then the reward; `weight` includes its scale."""
    rollout_number: int | None = None
    """Number of the rollout that it is a segment of, the same for all its rows; None: it is the only one."""
    teacher_logp: np.ndarray | None = None
    """float32 [A]: log-probabilities (nats) of its action tokens under the teacher; None: there is none."""

    @property
    def length(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.token_ids)

    @cached_property
    def inputs(self) -> np.ndarray:
        """Return the tokens that predict actions, int64: the prompt, and all before the last action."""
        mask = self.rollout.action_mask
        last = len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else 0
        return np.concatenate([np.array(self.rollout.prompt_ids, dtype=np.int64), self.rollout.token_ids[:last]])

    @cached_property
    def sort_key(self) -> bytes:
        """Bytes that compare as `inputs` do, and faster."""
        return self.inputs.astype(">u4").tobytes()


def rows_of(
    groups: Sequence[Group],
    advantage: Advantage,
    loss_type: LossType,
    *,
    max_completion_length: int,
    mask_truncated: bool = False,
    unbiased: bool = False,
    equal_groups: bool = False,
) -> list[Row]:
    """Return the rows of a batch, in order of groups and siblings, with weights that sum the loss over all of them.

    Members without a reward (failed, pruned) and greedy members are omitted. `unbiased`: each row counts as 1 / (its
    `survival_p`) rollouts (Horvitz and Thompson). `equal_groups`: average within each group, then over groups. Raises
    FloatingPointError on a non-finite advantage.
    """
    members: list[list[Row]] = []  # of each group, whole rollouts, weighted by the advantage's factor only
    for number, (group, advantages_G) in enumerate(zip(groups, advantage.of_batch(groups), strict=True)):
        factor, pool = 1.0, None
        if isinstance(advantage, InUpdate):
            factor = advantage.factor(group.rewards())
            pool = Pool(number if advantage.scope == "group" else 0, advantage.weighing)
        members.append([])
        for rollout, a in zip(group.rollouts, advantages_G, strict=True):
            if rollout.reward is None or rollout.greedy or (mask_truncated and rollout.truncated):
                continue
            if not np.isfinite(a):
                raise FloatingPointError(f"advantage {a} for visit {group.visit.number}, sibling {rollout.sibling}")
            members[-1].append(Row(rollout, float(a if pool is None else rollout.reward), factor, pool))
    everyone = [member for of_group in members for member in of_group]
    means = [averaged for averaged in (members if equal_groups else [everyone]) if averaged]
    weights: list[float] = []
    for averaged in means:
        lengths = np.array([int(row.rollout.action_mask.sum()) for row in averaged], dtype=np.float64)
        times = np.array([1 / row.rollout.survival_p if unbiased else 1.0 for row in averaged])
        weights += token_weights(lengths, loss_type, max_completion_length, times, len(means)).tolist()
    rows: list[Row] = []
    for member, weight in zip(everyone, weights, strict=True):
        rows += _segments(member, weight * member.weight, number=len(rows))
    return rows


def unweighted_rows(rollouts: Sequence[Rollout]) -> list[Row]:
    """Return the rows of rollouts of which only log-probabilities are computed."""
    return [row for number, rollout in enumerate(rollouts) for row in _segments(Row(rollout, 0.0, 0.0), 0.0, number)]


def _segments(whole: Row, weight: float, number: int) -> list[Row]:
    """Return one row per segment of a rollout. `number`: one that no other rollout of the batch has."""
    parts = whole.rollout.parts()
    of_several = number if len(parts) > 1 else None
    return [Row(part, whole.advantage, weight, whole.pool, of_several) for part in parts]


def rollouts_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each rollout, in order of their first rows."""
    rollouts: dict[tuple[str, int], list[Row]] = {}
    for number, row in enumerate(rows):
        key = ("alone", number) if row.rollout_number is None else ("several", row.rollout_number)
        rollouts.setdefault(key, []).append(row)
    return list(rollouts.values())


def token_weights(
    lengths_N: np.ndarray,
    loss_type: LossType,
    max_completion_length: int,
    times_N: np.ndarray | float = 1.0,
    groups: int = 1,
) -> np.ndarray:
    """Return the weight per token of each row with `lengths_N` action tokens; the loss is the plain sum over tokens.

    float64 [N] -> [N]. dapo 1/sum(len); grpo 1/(N len); dr_grpo 1/(N max_completion_length); sequence_sum 1/N. A row
    may represent `times_N` rollouts. `groups`: number of group means to average over.

    No denominator contains `times_N`: a row that counts more would increase it and so weigh less than it should.
    """
    n, times_N = max(len(lengths_N), 1) * groups, np.ones(len(lengths_N)) * times_N
    if loss_type == "dapo":
        return times_N / (max(lengths_N.sum(), 1) * groups)
    if loss_type == "grpo":
        return times_N / (n * np.maximum(lengths_N, 1))
    if loss_type == "dr_grpo":
        return times_N / (n * max_completion_length)
    return times_N / n


def with_gradient(rows: Sequence[Row], loss: LossConfig) -> list[Row]:
    """Return the rows that can contribute a gradient; without KL, entropy and teacher, advantage 0 contributes none.

    A pool contributes no gradient if all its rewards are equal; otherwise all its rows do.
    """
    alive = [row for row in rows if row.rollout.action_mask.any() and row.weight != 0]
    if not loss.only_advantages:
        return alive
    rewards: dict[Pool, set[float]] = {}
    for row in alive:
        if row.pool is not None:
            rewards.setdefault(row.pool, set()).add(row.advantage)
    return [row for row in alive if (row.advantage != 0 if row.pool is None else len(rewards[row.pool]) > 1)]
