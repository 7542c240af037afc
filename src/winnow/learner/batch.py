"""Micro-batches: rows of an update, packed by a token limit into padded arrays.

Rows of one rollout stay in one micro-batch, where sums over the rollout are taken.

Rows that begin alike may share a prefix tree, so that each token of the common beginning is computed once. The nodes of
a tree are tokens. A row is a path, and each node attends to itself and to those before it on its paths. So all outputs
and gradients are those of rows computed apart; what several rows have in common gets the sum of their gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple, cast

import numpy as np
import torch

from ..env.chat import common_prefix
from ..methods.advantage.in_update import Weighing
from .rows import Pool, Row, rollouts_of

PASS_TOKENS = 512
PASS_TOKENS_CUDA = 2048
"""Upper bound on the tokens that cost as much as the overhead of one more forward and backward pass."""
PAIRS_PER_TOKEN = 7.0
"""Pairs of tokens for which attention costs as much as all else for one token, per cube root of the parameters: 6 to 14
by operations, for usual shapes."""
BLOCK_SHARE = 0.75
"""Share of the token limit for rows whose activations are partly kept until their common baselines are known."""
TREE_GRAIN = 8
"""Trees are padded to a multiple of this: fused kernels want a mask with rows of 16 bytes."""


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
    """Whether the pieces together fit the token limit; otherwise they are one pool larger than it."""


@dataclass(frozen=True)
class PrefixTrees:
    """U trees of up to S nodes, in depth-first order: node j is on the way to node i if j <= i < stop[j]."""

    input_ids_US: torch.Tensor
    position_ids_US: torch.Tensor
    stop_US: torch.Tensor
    node_BT: torch.Tensor
    """int64: where the trees, laid end to end, have the token of a row; 0 from its last action on."""

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [U, 1, S, S]: 0 where node i (third) attends to node j (fourth), else very negative.

        In the type of the queries: of any other, attention would keep a copy in every layer.
        """
        nodes = torch.arange(self.stop_US.shape[1], device=self.stop_US.device)
        seen_USS = (nodes <= nodes[:, None]) & (nodes[:, None] < self.stop_US[:, None, :])
        mask = torch.zeros(seen_USS.shape, dtype=dtype, device=nodes.device)
        return mask.masked_fill_(~seen_USS, torch.finfo(dtype).min)[:, None]


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
class PassLimits:
    """Limits of a micro-batch, which is one forward and backward pass."""

    tokens: int = sys.maxsize
    """Computed tokens, padding included; a longer row is a micro-batch by itself."""
    pass_tokens: int = PASS_TOKENS
    """Tokens that cost as much as one more pass: the limit on padding."""
    pairs: float = 0.0
    """Pairs of tokens that attention computes in the time that one token takes elsewhere; 0: nothing is shared."""

    @staticmethod
    def for_model(tokens: int, parameters: int, *, share: bool, device: str = "cpu") -> PassLimits:
        """Return the limits for a model size. On CPUs one more pass costs as much as 512 tokens at 0.6 million
        parameters and 64 at 135 million, measured. On a GPU it costs thousands of launches: tens of milliseconds for
        any model."""
        pairs = PAIRS_PER_TOKEN * max(parameters, 1) ** (1 / 3) if share else 0.0
        if device == "cuda":
            return PassLimits(tokens, PASS_TOKENS_CUDA, pairs)
        return PassLimits(tokens, min(PASS_TOKENS, max(64, 300_000_000 // max(parameters, 1))), pairs)


NO_LIMIT = PassLimits()


class Place(NamedTuple):
    """Where a row is in the trees."""

    tree: int
    shared: int
    """Tokens that it shares with the row before it in that tree."""


@dataclass(frozen=True)
class Packing:
    """Rows that one pass computes, with the prefix trees that hold them; grown rollout by rollout."""

    limits: PassLimits
    rollouts: list[Sequence[Row]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """One per row; none if the limits let them share nothing."""
    sizes: list[int] = field(default_factory=list)
    """Nodes of each tree."""
    longest: int = 0
    tokens: int = 0
    """Tokens of the rows, prompts included."""
    _last: dict[tuple[int, ...], tuple[int, np.ndarray]] = field(default_factory=dict)
    """Prompt -> its last tree, and the inputs of the row placed there last."""

    @staticmethod
    def from_rows(rows: Sequence[Row], limits: PassLimits) -> Packing:
        packing = Packing(limits)
        for rollout in rollouts_of(rows):
            packing = packing.with_rollout(rollout)
        return packing

    def with_rollout(self, rollout: Sequence[Row]) -> Packing:
        """Return a larger packing, whose trees have grown by the rows of `rollout`."""
        packing = Packing(
            self.limits,
            [*self.rollouts, rollout],
            [*self.places],
            [*self.sizes],
            max(self.longest, *(row.length for row in rollout)),
            self.tokens + sum(row.length for row in rollout),
            {**self._last},
        )
        if self.limits.pairs:
            packing.places.extend(packing._place(row) for row in rollout)
        return packing

    def _place(self, row: Row) -> Place:
        """Add a row to the tree of the row before it with the same prompt, from where they differ.

        It gets a tree of its own where attention to all nodes of a tree would cost more than sharing saves.
        """
        tokens, prompt = row.inputs, row.rollout.prompt_ids
        tree, before = self._last.get(prompt, (-1, tokens[:0]))
        shared = common_prefix(before, tokens)
        size, new = self.sizes[tree] if shared else 0, len(tokens) - shared
        if (size + new) ** 2 - size**2 - len(tokens) ** 2 / 2 > self.limits.pairs * shared:
            shared, new = 0, len(tokens)
        if not shared:
            tree = len(self.sizes)
            self.sizes.append(0)
        self.sizes[tree] += new
        self._last[prompt] = tree, tokens
        return Place(tree, shared)

    @property
    def rows(self) -> list[Row]:
        return list(chain.from_iterable(self.rollouts))

    @property
    def shares(self) -> bool:
        """Return whether trees cost less. Without them the last token of a row and half of its pairs are left out."""
        if not self.sizes:
            return False
        S, T, pairs = max(self.sizes), self.longest, self.limits.pairs
        rows = len(self.places)
        return len(self.sizes) * S * (1 + S / pairs) < rows * (T - 1) * (1 + T / 2 / pairs)

    @property
    def computed(self) -> int:
        """Return the number of computed tokens, padding included."""
        if self.shares:
            return len(self.sizes) * max(self.sizes)
        return sum(len(rollout) for rollout in self.rollouts) * self.longest

    @property
    def fits(self) -> bool:
        """Return whether it is within the limits."""
        computed = self.computed
        padding = computed - (sum(self.sizes) if self.shares else self.tokens)
        return computed <= self.limits.tokens and padding <= self.limits.pass_tokens

    def micro_batch(self, pad_id: int, device: torch.device | str = "cpu") -> MicroBatch:
        """Right-pad the rows, or lay out their trees."""
        rows = self.rows
        B, T = len(rows), self.longest
        ids = np.full((B, T), pad_id, dtype=np.int64)
        mask = np.zeros((B, T), dtype=bool)
        logp = np.zeros((B, T), dtype=np.float32)
        for b, row in enumerate(rows):
            rollout, p = row.rollout, len(row.rollout.prompt_ids)
            ids[b, :p] = rollout.prompt_ids
            ids[b, p : row.length] = rollout.token_ids
            mask[b, p : row.length] = rollout.action_mask
            logp[b, p : row.length] = rollout.sampler_logp
        number_B = [number for number, rollout in enumerate(self.rollouts) for _ in rollout]
        return MicroBatch(
            input_ids_BT=torch.from_numpy(ids).to(device),
            mask_BT=torch.from_numpy(mask).to(device),
            sampler_logp_BT=torch.from_numpy(logp).to(device),
            advantages_B=torch.tensor([row.advantage for row in rows], dtype=torch.float64, device=device),
            row_weight_B=torch.tensor([row.weight for row in rows], dtype=torch.float64, device=device),
            rollout_B=None if len(self.rollouts) == B else torch.tensor(number_B, device=device),
            trees=self.trees(device) if self.shares else None,
        )

    def trees(self, device: torch.device | str = "cpu") -> PrefixTrees:
        """Return the trees as arrays."""
        rows = self.rows
        S = -(-max(self.sizes) // TREE_GRAIN) * TREE_GRAIN
        shape = len(self.sizes), S
        ids, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        stops = np.broadcast_to(np.arange(1, S + 1), shape).copy()  # padding attends to itself
        nodes = np.zeros((len(rows), self.longest), dtype=np.int64)
        paths = [np.zeros(0, dtype=np.int64)] * len(self.sizes)
        grown = [0] * len(self.sizes)
        for b, (row, (u, shared)) in enumerate(zip(rows, self.places, strict=True)):
            start, tokens = grown[u], row.inputs
            grown[u] = stop = start + len(tokens) - shared
            stops[u, paths[u][shared:]] = start
            paths[u] = np.concatenate([paths[u][:shared], np.arange(start, stop)])
            ids[u, start:stop], positions[u, start:stop] = tokens[shared:], np.arange(shared, len(tokens))
            stops[u, paths[u]] = stop
            nodes[b, : len(tokens)] = u * S + paths[u]
        return PrefixTrees(*(torch.from_numpy(array).to(device) for array in (ids, positions, stops, nodes)))


def packed(rows: Sequence[Row], limits: PassLimits) -> list[Packing]:
    """Group rows of similar length, longest first, or group siblings, whichever computes fewer tokens; ignore pools."""
    by_length = sorted(rollouts_of(rows), key=lambda rollout: max(row.length for row in rollout), reverse=True)
    if not limits.pairs:
        return _cut(by_length, limits)
    longest: dict[tuple[int, ...], int] = {}
    for first, *others in by_length:
        longest.setdefault(first.rollout.prompt_ids, max(row.length for row in (first, *others)))

    def sibling_order(rollout: Sequence[Row]) -> tuple[int, tuple[int, ...], list[int]]:
        prompt = rollout[0].rollout.prompt_ids
        return -longest[prompt], prompt, rollout[0].inputs.tolist()

    orders = by_length, sorted(by_length, key=sibling_order)
    return min((_cut(order, limits) for order in orders), key=_cost)


def _cut(rollouts: Sequence[Sequence[Row]], limits: PassLimits) -> list[Packing]:
    """Split rollouts in this order into packings, each as large as the limits allow."""
    packings: list[Packing] = []
    for rollout in rollouts:
        if packings and (larger := packings[-1].with_rollout(rollout)).fits:
            packings[-1] = larger
        else:
            packings.append(Packing(limits).with_rollout(rollout))
    return packings


def _cost(packings: Sequence[Packing]) -> int:
    """Return the cost of computing these packings, in tokens."""
    return sum(packing.computed + packing.limits.pass_tokens for packing in packings)


def collate(
    rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu", limits: PassLimits = NO_LIMIT
) -> MicroBatch:
    """Return rows in this order as one micro-batch, of any size."""
    return Packing.from_rows(rows, limits).micro_batch(pad_id, device)


def micro_batches(
    rows: Sequence[Row], limits: PassLimits, *, pad_id: int, device: torch.device | str = "cpu"
) -> list[MicroBatch]:
    """Pack the rows of an update.

    Pools are packed into blocks of at most `BLOCK_SHARE` of the token limit, unless one pool is larger. Rows are
    grouped only within a block.
    """
    if not rows or any(row.pool is None for row in rows):
        return [packing.micro_batch(pad_id, device) for packing in packed(rows, limits)]
    weighing = cast(Pool, rows[0].pool).weighing
    if weighing == "gradient":  # norms need each row by itself
        limits = replace(limits, pairs=0.0)
    batches: list[MicroBatch] = []
    for block in _blocks(rows, int(BLOCK_SHARE * limits.tokens)):
        rewards: dict[Pool | None, list[float]] = {}
        for rollout in rollouts_of(block):
            rewards.setdefault(rollout[0].pool, []).append(rollout[0].advantage)
        numbers = {pool: number for number, pool in enumerate(rewards)}
        mean_P = torch.tensor([np.mean(of_pool) for of_pool in rewards.values()], device=device)
        fits = sum(row.length for row in block) <= limits.tokens
        pieces: list[MicroBatch] = []
        for packing in packed(block, limits):
            batch = packing.micro_batch(pad_id, device)
            number_B = torch.tensor([numbers[row.pool] for row in packing.rows], device=device)
            batch.pools = Pools(weighing, number_B, mean_P, pieces, fits)
            pieces.append(batch)
        batches += pieces
    return batches


def _blocks(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Group whole pools of similar length, up to `tokens` tokens; a larger pool is a block by itself."""
    pools: dict[Pool | None, list[Row]] = {}
    for row in rows:
        pools.setdefault(row.pool, []).append(row)
    blocks: list[list[Row]] = []
    room = 0
    for pool in sorted(pools.values(), key=lambda rows: max(row.length for row in rows), reverse=True):
        needed = sum(row.length for row in pool)
        if not blocks or needed > room:
            blocks.append([])
            room = tokens
        blocks[-1] += pool
        room -= needed
    return blocks
