"""Micro-batches: rows of an update as padded arrays, split by a token budget.

Rows of one rollout stay in one micro-batch, where sums over the rollout are taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from ..methods.advantage.in_update import Weighing
from .rows import Pool, Row, rollouts_of
from .trees import Forest, PrefixTrees, plant

PASS_TOKENS = 512
PASS_TOKENS_CUDA = 2048
"""Upper bound on the tokens that cost as much as the overhead of one more forward and backward pass."""
PAIRS = 7.0
"""Pairs of tokens for which attention costs as much as all else for one token, per cube root of the parameters: 6 to 14
by operations, for usual shapes."""
BLOCK = 0.75
"""Share of the token budget for rows whose activations are partly kept until their common baselines are known."""


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
    trees: PrefixTrees | None = None
    """Set when rows that begin alike are computed together."""
    old_logp_BT: torch.Tensor | None = None
    """Policy before this batch's first update; the learner sets it on the first pass if a correction is active."""
    pools: Pools | None = None
    """None: `advantages_B` are final."""
    rollout_B: torch.Tensor | None = None
    """int64: number of the row's rollout, ascending from 0; None: each row is a rollout."""


@dataclass(frozen=True)
class Budget:
    """Limits of a micro-batch."""

    tokens: int = sys.maxsize
    """Computed tokens, padding included; a longer row is a micro-batch by itself."""
    pass_tokens: int = PASS_TOKENS
    """Tokens that cost as much as one more pass: the limit on padding."""
    pairs: float = 0.0
    """As in `Forest`; 0: nothing is shared."""

    @staticmethod
    def for_model(tokens: int, parameters: int, *, share: bool, device: str = "cpu") -> Budget:
        """Return the budget for a model size. On CPUs one more pass costs as much as 512 tokens at 0.6 million
        parameters and 64 at 135 million, measured. On a GPU it costs thousands of launches: tens of milliseconds for
        any model."""
        pairs = PAIRS * max(parameters, 1) ** (1 / 3) if share else 0.0
        if device == "cuda":
            return Budget(tokens, PASS_TOKENS_CUDA, pairs)
        return Budget(tokens, min(PASS_TOKENS, max(64, 300_000_000 // max(parameters, 1))), pairs)


NO_LIMIT = Budget()


def micro_batches(
    rows: Sequence[Row], budget: Budget, *, pad_id: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Group rows of similar length, longest first, or group siblings, whichever computes fewer tokens.

    Pools are packed into blocks of at most `BLOCK` of the budget, unless one pool is larger. Rows are grouped only
    within a block.
    """
    if not rows or any(row.pool is None for row in rows):
        return [collate(part, pad_id, device, budget) for part in packed(rows, budget)]
    if cast(Pool, rows[0].pool).weighing == "gradient":  # norms need each row by itself
        budget = replace(budget, pairs=0.0)
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
    if not budget.pairs:
        return _cut(by_length, budget)
    longest: dict[tuple[int, ...], int] = {}
    for of_one in by_length:
        longest.setdefault(of_one[0].rollout.prompt_ids, max(row.length for row in of_one))
    siblings = sorted(
        by_length, key=lambda of_one: (-longest[_prompt(of_one)], _prompt(of_one), of_one[0].inputs.tolist())
    )
    return min((_cut(order, budget) for order in (by_length, siblings)), key=lambda parts: _cost(parts, budget))


def _prompt(of_one: Sequence[Row]) -> tuple[int, ...]:
    return of_one[0].rollout.prompt_ids


def _cut(rollouts: Sequence[Sequence[Row]], budget: Budget) -> list[list[Row]]:
    """Split rollouts in this order into parts, each as large as the budget allows."""
    parts: list[list[Row]] = []
    extent = Extent.of([], budget)
    for of_one in rollouts:
        grown = extent.with_rows(of_one)
        if not parts or grown.computed > budget.tokens or grown.padding > budget.pass_tokens:
            parts.append([])
            grown = Extent.of(of_one, budget)
        parts[-1] += of_one
        extent = grown
    return parts


def _cost(parts: Sequence[Sequence[Row]], budget: Budget) -> int:
    """Return the cost of computing these micro-batches, in tokens."""
    return sum(Extent.of(part, budget).computed + budget.pass_tokens for part in parts)


@dataclass(frozen=True)
class Extent:
    """Tokens that a micro-batch of some rows would compute."""

    forest: Forest
    rows: int = 0
    longest: int = 0
    tokens: int = 0
    """Tokens of the rows, prompts included."""

    @staticmethod
    def of(rows: Sequence[Row], budget: Budget) -> Extent:
        return Extent(Forest(budget.pairs)).with_rows(rows)

    def with_rows(self, rows: Sequence[Row]) -> Extent:
        forest = self.forest.copy()
        for row in rows if forest.pairs else ():
            forest.add(row)
        longest = max([self.longest, *(row.length for row in rows)])
        return Extent(forest, self.rows + len(rows), longest, self.tokens + sum(row.length for row in rows))

    @property
    def shares(self) -> bool:
        """Return whether trees cost less. Without them the last token of a row and half of its pairs are left out."""
        if not self.forest.sizes:
            return False
        S, T = max(self.forest.sizes), self.longest
        together = self._together * (1 + S / self.forest.pairs)
        return together < self.rows * (T - 1) * (1 + T / 2 / self.forest.pairs)

    @property
    def computed(self) -> int:
        """Return the number of computed tokens, padding included."""
        return self._together if self.shares else self.rows * self.longest

    @property
    def padding(self) -> int:
        return self.computed - (sum(self.forest.sizes) if self.shares else self.tokens)

    @property
    def _together(self) -> int:
        return len(self.forest.sizes) * max(self.forest.sizes)


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
        trees=plant(rows, budget.pairs, device) if Extent.of(rows, budget).shares else None,
    )


def _rollout_numbers(rows: Sequence[Row], device: torch.device | str) -> torch.Tensor | None:
    """Return `MicroBatch.rollout_B`."""
    rollouts = rollouts_of(rows)
    if len(rollouts) == len(rows):
        return None
    return torch.tensor([n for n, of_one in enumerate(rollouts) for _ in of_one], device=device)
