"""Micro-batches: rows of an update as padded arrays, split by a token budget.

Rows of one rollout stay in one micro-batch, where sums over the rollout are taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from ..methods.advantage.in_update import Weighing
from .rows import Pool, Row, rollouts_of

PASS_TOKENS = 512
PASS_TOKENS_CUDA = 2048
"""Upper bound on the tokens that cost as much as the overhead of one more forward and backward pass."""
COLUMN_CUDA = 0.3
"""Memory of a column in each row with a shared prompt, in computed tokens: keys and values are copied for the row, and
once more for every head. Counted in bfloat16: 0.1 (Qwen2.5-0.5B) to 0.28 (sizes of Qwen3-0.6B)."""
BLOCK = 0.75
"""Share of the token budget for rows whose activations are partly kept until their common baselines are known."""


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


@dataclass(frozen=True)
class Budget:
    """Limits of a micro-batch."""

    tokens: int = sys.maxsize
    """Computed tokens, padding included; a longer row is a micro-batch by itself."""
    pass_tokens: int = PASS_TOKENS
    """Tokens that cost as much as one more pass: the limit on padding and on prompts computed twice."""
    share: bool = True
    """Whether a prompt can be computed once for all of its rows."""
    column: float = 0.0
    """Tokens that a column of a row with a shared prompt counts in addition."""

    @staticmethod
    def for_model(tokens: int, parameters: int, *, share: bool, device: str = "cpu") -> Budget:
        """Return the budget for a model size. On CPUs one more pass costs as much as 512 tokens at 0.6 million
        parameters and 64 at 135 million, measured. On a GPU it costs thousands of launches: tens of milliseconds for
        any model. There the budget is also a limit on memory, so that columns count."""
        if device == "cuda":
            return Budget(tokens, PASS_TOKENS_CUDA, share, COLUMN_CUDA)
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
        if not parts or grown.held(budget) > budget.tokens or grown.padding(budget) > budget.pass_tokens:
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

    def held(self, budget: Budget) -> float:
        """Return the memory for the backward pass, in tokens."""
        if not self.shares(budget):
            return self._apart
        return self._together + budget.column * self.rows * (self.longest_prompt + self.longest_completion)

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
