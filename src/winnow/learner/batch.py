"""Convert admitted groups to arrays.

A row is one segment of a rollout (mostly the whole rollout) with an advantage. Rows are first weighted over the whole
optimizer batch (the token reduction). Rows without a gradient are then dropped, and the rest is split into
micro-batches by a token budget. Rows of one rollout stay in one micro-batch, where sums over the rollout are taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from ..methods.advantage import Advantage, InUpdate
from ..methods.advantage.in_update import Weighing
from ..methods.loss import LossConfig, LossType
from ..types import Fate, Group, Rollout

PASS_TOKENS = 512
PASS_TOKENS_CUDA = 2048
"""Upper bound on the tokens that cost as much as the overhead of one more forward and backward pass."""
BLOCK = 0.75
"""Share of the token budget for rows whose activations are partly kept until their common baselines are known."""


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
    whole: int | None = None
    """Number of the rollout that it is a segment of, the same for all its rows; None: it is the only one."""

    @property
    def length(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.token_ids)


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts that rows of a micro-batch share, so that each of U prompts is computed only once."""

    first_U: torch.Tensor
    """Index of a row with the prompt."""
    prompt_B: torch.Tensor
    """Prompt index of the row."""
    length_B: torch.Tensor
    """Prompt tokens of the row."""
    longest_prompt: int
    longest_completion: int

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts, padded."""
        return len(self.first_U) * self.longest_prompt


@dataclass(frozen=True)
class Pools:
    """The pools of a micro-batch; its `advantages_B` are rewards.

    Pools may span several micro-batches, so that each holds rows of similar length.
    """

    weighing: Weighing
    number_B: torch.Tensor
    """int64: pool index of the row, from 0 over all pieces."""
    mean_P: torch.Tensor
    """float64: mean reward of each pool."""
    pieces: list[MicroBatch]
    """The micro-batches that these pools span, in order."""
    fits: bool
    """Whether the pieces together fit the token budget; otherwise they are one pool larger than the budget."""


@dataclass
class MicroBatch:
    """Right-padded arrays of B rows with T tokens. `mask_BT` is True where the policy sampled the token."""

    input_ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    sampler_logp_BT: torch.Tensor
    advantages_B: torch.Tensor
    """float64, like `row_weight_B`: the learner rounds both to its compute dtype."""
    row_weight_B: torch.Tensor
    shared: SharedPrompts | None = None
    """Set when computing prompts once saves more than the extra pass costs."""
    old_logp_BT: torch.Tensor | None = None
    """Policy before this batch's first update; the learner sets it on the first pass if a correction is active."""
    pools: Pools | None = None
    """None: `advantages_B` are final."""
    rollout_B: torch.Tensor | None = None
    """int64: number of the row's rollout, ascending from 0; None: each row is a rollout."""


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
    survival probability) rollouts, and the mean includes pruned members (Horvitz and Thompson). The expected loss then
    equals that without pruning, except for the effect of pruning on advantage baselines and, under `dapo`, the
    estimated number of tokens. `equal_groups`: average within each group, then over groups. Raises FloatingPointError
    on a non-finite advantage.
    """
    members: list[list[tuple[Rollout, float]]] = []
    pools: list[tuple[float, Pool | None]] = []
    for number, (group, advantages_G) in enumerate(zip(groups, advantage.of_batch(groups), strict=True)):
        factor, pool = 1.0, None
        if isinstance(advantage, InUpdate):
            factor = advantage.factor(group.rewards())
            pool = Pool(number if advantage.scope == "group" else 0, advantage.weighing)
        members.append([])
        for rollout, a in zip(group.rollouts, advantages_G, strict=True):
            if rollout.reward is None or rollout.greedy or (mask_truncated and rollout.stop_reason == "length"):
                continue
            if not np.isfinite(a):
                raise FloatingPointError(f"advantage {a} for visit {group.visit.number}, sibling {rollout.sibling}")
            members[-1].append((rollout, float(a if pool is None else rollout.reward)))
            pools.append((factor, pool))
    pruned = [sum(r.fate == Fate.PRUNED for r in group.siblings) if unbiased else 0 for group in groups]
    everyone = [member for some in members for member in some]
    means = list(zip(members, pruned, strict=True)) if equal_groups else [(everyone, sum(pruned))]
    means = [(some, absent) for some, absent in means if len(some) + absent]
    weights: list[float] = []
    for some, absent in means:
        lengths = np.array([int(r.action_mask.sum()) for r, _ in some], dtype=np.float64)
        times = np.array([1 / r.survival_p if unbiased else 1.0 for r, _ in some])
        count = len(some) + absent
        weights += token_weights(lengths, loss_type, max_completion_length, times, count, len(means)).tolist()
    rows: list[Row] = []
    for (rollout, a), weight, (factor, pool) in zip(everyone, weights, pools, strict=True):
        rows += rows_of_rollout(rollout, a, weight * factor, pool, whole=len(rows))
    return rows


def rows_of_rollout(
    rollout: Rollout, advantage: float = 0.0, weight: float = 0.0, pool: Pool | None = None, *, whole: int = 0
) -> list[Row]:
    """Return one row per segment. `whole`: a number that no other rollout of the batch has."""
    number = whole if rollout.later else None
    return [Row(part, advantage, weight, pool, number) for part in rollout.parts()]


def rollouts_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each rollout, in order of their first rows."""
    found: dict[tuple[str, int], list[Row]] = {}
    for number, row in enumerate(rows):
        key = ("alone", number) if row.whole is None else ("whole", row.whole)
        found.setdefault(key, []).append(row)
    return list(found.values())


def token_weights(
    lengths_N: np.ndarray,
    loss_type: LossType,
    max_completion_length: int,
    times_N: np.ndarray | float = 1.0,
    count: int | None = None,
    groups: int = 1,
) -> np.ndarray:
    """Return the weight per token of each row with `lengths_N` action tokens; the loss is the plain sum over tokens.

    float64 [N] -> [N]. dapo 1/sum(len); grpo 1/(N len); dr_grpo 1/(N max_completion_length); sequence_sum 1/N. A row
    may represent `times_N` rollouts, out of `count` (default N). `groups`: number of group means to average over.
    """
    n, times_N = max(len(lengths_N) if count is None else count, 1) * groups, np.ones(len(lengths_N)) * times_N
    if loss_type == "dapo":
        return times_N / (max((lengths_N * times_N).sum(), 1) * groups)
    if loss_type == "grpo":
        return times_N / (n * np.maximum(lengths_N, 1))
    if loss_type == "dr_grpo":
        return times_N / (n * max_completion_length)
    return times_N / n


def with_gradient(rows: Sequence[Row], loss: LossConfig) -> list[Row]:
    """Return the rows that can contribute a gradient; without KL and entropy terms, advantage 0 contributes none.

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


@dataclass(frozen=True)
class Budget:
    """Limits of a micro-batch."""

    tokens: int = sys.maxsize
    """Computed tokens, padding included; a longer row is a micro-batch by itself."""
    pass_tokens: int = PASS_TOKENS
    """Tokens that cost as much as one more pass: the limit on padding and on prompts computed twice."""
    share: bool = True
    """Whether a prompt can be computed once for all of its rows."""

    @staticmethod
    def for_model(tokens: int, parameters: int, *, share: bool, device: str = "cpu") -> Budget:
        """Return the budget for a model size. On CPUs one more pass costs as much as 512 tokens at 0.6 million
        parameters and 64 at 135 million, measured. On a GPU it costs thousands of launches: tens of milliseconds for
        any model."""
        if device == "cuda":
            return Budget(tokens, PASS_TOKENS_CUDA, share)
        return Budget(tokens, min(PASS_TOKENS, max(64, 300_000_000 // max(parameters, 1))), share)


NO_LIMIT = Budget()


def micro_batches(
    rows: Sequence[Row], budget: Budget, *, pad_id: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Group rows of similar length, longest first, or group siblings, whichever computes fewer tokens.

    Pools are packed into blocks of at most `BLOCK` of the budget, unless one pool is larger. Rows are grouped only
    within a block.
    """
    if any(row.pool is None for row in rows):
        return [collate(part, pad_id, device, budget) for part in packed(rows, budget)]
    found: list[MicroBatch] = []
    for block in _blocks(rows, int(BLOCK * budget.tokens)):
        numbers = {pool: p for p, pool in enumerate(dict.fromkeys(row.pool for row in block))}
        mean_P = torch.tensor(
            [np.mean([rows[0].advantage for rows in rollouts_of(block) if rows[0].pool == pool]) for pool in numbers],
            device=device,
        )
        fits = sum(row.length for row in block) <= budget.tokens
        pieces: list[MicroBatch] = []
        for part in packed(block, budget):
            batch = collate(part, pad_id, device, budget)
            number_B = torch.tensor([numbers[row.pool] for row in part], device=device)
            batch.pools = Pools(cast(Pool, part[0].pool).weighing, number_B, mean_P, pieces, fits)
            pieces.append(batch)
        found += pieces
    return found


def _blocks(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Group whole pools of similar length, up to `tokens` tokens; a larger pool is a block by itself."""
    pools: dict[Pool | None, list[Row]] = {}
    for row in rows:
        pools.setdefault(row.pool, []).append(row)
    blocks: list[list[Row]] = []
    room = 0
    for pool in sorted(pools.values(), key=lambda p: max(row.length for row in p), reverse=True):
        needed = sum(row.length for row in pool)
        if not blocks or needed > room:
            blocks.append([])
            room = tokens
        blocks[-1] += pool
        room -= needed
    return blocks


def packed(rows: Sequence[Row], budget: Budget) -> list[list[Row]]:
    """Return the rows of each micro-batch of `micro_batches`, ignoring pools."""
    by_length = sorted(rollouts_of(rows), key=lambda of_one: max(row.length for row in of_one), reverse=True)
    if not budget.share:
        return _cut(by_length, budget)
    longest: dict[tuple[int, ...], int] = {}
    for of_one in by_length:
        longest.setdefault(of_one[0].rollout.prompt_ids, max(row.length for row in of_one))
    siblings = sorted(by_length, key=lambda of_one: (-longest[_prompt(of_one)], _prompt(of_one)))
    return min((_cut(order, budget) for order in (by_length, siblings)), key=lambda parts: _cost(parts, budget))


def _prompt(of_one: Sequence[Row]) -> tuple[int, ...]:
    return of_one[0].rollout.prompt_ids


def _cut(rollouts: Sequence[Sequence[Row]], budget: Budget) -> list[list[Row]]:
    """Split rollouts in this order into parts, each as large as the budget allows."""
    parts: list[list[Row]] = []
    extent = Extent()
    for of_one in rollouts:
        grown = extent.with_rows(of_one)
        if not parts or grown.computed(budget) > budget.tokens or grown.padding(budget) > budget.pass_tokens:
            parts.append([])
            grown = Extent.of(of_one)
        parts[-1] += of_one
        extent = grown
    return parts


def _cost(parts: Sequence[Sequence[Row]], budget: Budget) -> int:
    """Return the cost of computing these micro-batches, in tokens."""
    return sum(Extent.of(part).computed(budget) + budget.pass_tokens for part in parts)


@dataclass(frozen=True)
class Extent:
    """Tokens that a micro-batch of some rows would compute."""

    rows: int = 0
    longest: int = 0
    prompts: frozenset[tuple[int, ...]] = frozenset()
    longest_prompt: int = 0
    longest_completion: int = 0
    tokens: int = 0
    """Tokens of the rows, prompts included."""
    shared_tokens: int = 0
    """Tokens of the rows' completions, plus each prompt once."""

    @staticmethod
    def of(rows: Sequence[Row]) -> Extent:
        return Extent().with_rows(rows)

    def with_rows(self, rows: Sequence[Row]) -> Extent:
        extent = self
        for row in rows:
            extent = extent.with_row(row)
        return extent

    def with_row(self, row: Row) -> Extent:
        prompt, completion = row.rollout.prompt_ids, len(row.rollout.token_ids)
        new = prompt not in self.prompts
        return Extent(
            self.rows + 1,
            max(self.longest, row.length),
            self.prompts | {prompt} if new else self.prompts,
            max(self.longest_prompt, len(prompt)),
            max(self.longest_completion, completion),
            self.tokens + row.length,
            self.shared_tokens + completion + new * len(prompt),
        )

    def shares(self, budget: Budget) -> bool:
        """Return whether to compute each prompt once, which takes one more pass."""
        return budget.share and self._apart - self._together > budget.pass_tokens

    def computed(self, budget: Budget) -> int:
        """Return the number of computed tokens, padding included."""
        return self._together if self.shares(budget) else self._apart

    def padding(self, budget: Budget) -> int:
        return self.computed(budget) - (self.shared_tokens if self.shares(budget) else self.tokens)

    @property
    def _apart(self) -> int:
        return self.rows * self.longest

    @property
    def _together(self) -> int:
        return len(self.prompts) * self.longest_prompt + self.rows * self.longest_completion


def collate(
    rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu", budget: Budget = NO_LIMIT
) -> MicroBatch:
    """Right-pad rows into one micro-batch."""
    B, T = len(rows), max(row.length for row in rows)
    ids = np.full((B, T), pad_id, dtype=np.int64)
    mask = np.zeros((B, T), dtype=bool)
    logp = np.zeros((B, T), dtype=np.float32)
    for b, row in enumerate(rows):
        rollout, p = row.rollout, len(row.rollout.prompt_ids)
        ids[b, :p] = rollout.prompt_ids
        ids[b, p : row.length] = rollout.token_ids
        mask[b, p : row.length] = rollout.action_mask
        logp[b, p : row.length] = rollout.sampler_logp
    return MicroBatch(
        input_ids_BT=torch.from_numpy(ids).to(device),
        mask_BT=torch.from_numpy(mask).to(device),
        sampler_logp_BT=torch.from_numpy(logp).to(device),
        advantages_B=torch.tensor([row.advantage for row in rows], dtype=torch.float64, device=device),
        row_weight_B=torch.tensor([row.weight for row in rows], dtype=torch.float64, device=device),
        rollout_B=_rollout_numbers(rows, device),
        shared=share_prompts(rows, device) if Extent.of(rows).shares(budget) else None,
    )


def _rollout_numbers(rows: Sequence[Row], device: torch.device | str) -> torch.Tensor | None:
    """Return `MicroBatch.rollout_B`."""
    rollouts = rollouts_of(rows)
    if len(rollouts) == len(rows):
        return None
    return torch.tensor([n for n, of_one in enumerate(rollouts) for _ in of_one], device=device)


def share_prompts(rows: Sequence[Row], device: torch.device | str = "cpu") -> SharedPrompts:
    first: dict[tuple[int, ...], int] = {}
    for b, row in enumerate(rows):
        first.setdefault(row.rollout.prompt_ids, b)
    number = {prompt: u for u, prompt in enumerate(first)}
    return SharedPrompts(
        first_U=torch.tensor(list(first.values()), device=device),
        prompt_B=torch.tensor([number[row.rollout.prompt_ids] for row in rows], device=device),
        length_B=torch.tensor([len(row.rollout.prompt_ids) for row in rows], device=device),
        longest_prompt=max(map(len, first)),
        longest_completion=max(len(row.rollout.token_ids) for row in rows),
    )
