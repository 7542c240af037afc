"""Micro-batches: rows of an update, packed by a token limit into padded arrays.

Rows of one rollout stay in one micro-batch, where sums over the rollout are taken.

Rows that begin alike may share a prefix tree, so that each token of the common beginning is computed once. The nodes of
a tree are tokens. A row is a path, and each node attends to itself and to those before it on its paths. So all outputs
and gradients are those of rows computed apart; what several rows have in common gets the sum of their gradients.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import cast

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
"""Lanes are padded to a multiple of this: fused kernels want a mask with rows of 16 bytes."""
LANE_WIDTHS = (1, 2, 3, 4, 6, 8)
"""Widths of lanes that are tried, in longest rows."""


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
    """Trees in U lanes of S nodes, in depth-first order: node j is on the way to node i if j <= i < stop[j]."""

    input_ids_US: torch.Tensor
    position_ids_US: torch.Tensor
    stop_US: torch.Tensor
    node_BT: torch.Tensor
    """int64: where the lanes, laid end to end, have the token of a row; 0 from its last action on."""
    predicting_P: torch.Tensor
    """int64: nodes that predict a sampled token, ascending."""
    predicting_N: torch.Tensor
    """int64: which of them predicts each sampled token, in row-major order."""

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
    teacher_logp_BT: torch.Tensor | None = None
    """Log-probabilities under the teacher, 0 outside the mask; None: there is none."""
    sampled_N: torch.Tensor = field(default=None)  # type: ignore[assignment]
    """int64: where `mask_BT[:, 1:]`, laid end to end, is True, ascending. Unlike the mask, it is an index for which the
    host need not wait."""

    def __post_init__(self) -> None:
        if self.sampled_N is None:
            self.sampled_N = self.mask_BT[:, 1:].flatten().nonzero()[:, 0]

    def sampled(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Return the values [N] of sampled tokens; columns shifted by one."""
        return values_BT.flatten(0, 1)[self.sampled_N]

    def spread(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return [B, T-1]: the values of sampled tokens, and 0 elsewhere."""
        shape = self.mask_BT[:, 1:].shape
        return values_N.new_zeros(shape.numel()).scatter(0, self.sampled_N, values_N).view(shape)


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


@dataclass(frozen=True)
class Lanes:
    """Where rows are in the trees. Trees lie end to end in lanes of `width` nodes."""

    order: list[int]
    """Rows in lexicographic order: each shares most with the one before it."""
    shared: list[int]
    """Nodes that a row, in this order, has in common with the one before it in its lane."""
    lane: list[int]
    """Lane of each row in this order, ascending."""
    width: int

    @property
    def computed(self) -> int:
        """Return the number of nodes, padding included."""
        return (self.lane[-1] + 1) * self.width

    def cost(self, pairs: float) -> float:
        """Return the cost in tokens: a node attends to all of its lane."""
        return self.computed * (1 + self.width / pairs)


def best_lanes(rows: Sequence[Row], limits: PassLimits) -> Lanes:
    """Return the cheapest lanes: wide ones repeat and pad less, and narrow ones attend to less."""
    order = sorted(range(len(rows)), key=lambda b: rows[b].sort_key)
    inputs = [rows[b].inputs for b in order]
    lengths = [len(tokens) for tokens in inputs]
    shared = [0, *(common_prefix(before, tokens) for before, tokens in pairwise(inputs))]
    longest, nodes = max(lengths), sum(lengths) - sum(shared)
    most = max(longest, min(nodes, limits.tokens // TREE_GRAIN * TREE_GRAIN))
    widths = dict.fromkeys([*(min(times * longest, most) for times in LANE_WIDTHS), most])
    return min((_filled(order, lengths, shared, room) for room in widths), key=lambda lanes: lanes.cost(limits.pairs))


def _filled(order: list[int], lengths: list[int], shared: list[int], room: int) -> Lanes:
    """Fill lanes of `room` nodes in this order; a row that does not fit begins the next one."""
    width = -(-room // TREE_GRAIN) * TREE_GRAIN
    lanes: list[int] = []
    within: list[int] = []
    lane, used = -1, width + 1
    for length, common in zip(lengths, shared, strict=True):
        used += length - common
        if used > width:
            lane, used, common = lane + 1, length, 0
        lanes.append(lane)
        within.append(common)
    return Lanes(order, within, lanes, width)


@dataclass(frozen=True)
class Packing:
    """Rows that one pass computes."""

    rollouts: Sequence[Sequence[Row]]
    lanes: Lanes | None = None
    """None: rows are padded to the longest, and share nothing."""

    @staticmethod
    def sharing(rollouts: Sequence[Sequence[Row]], limits: PassLimits) -> Packing:
        """Return a packing with prefix trees, where they cost less."""
        apart = Packing(rollouts)
        if not limits.pairs:
            return apart
        shared = Packing(rollouts, best_lanes(apart.rows, limits))
        return shared if shared.cost(limits) < apart.cost(limits) else apart

    @cached_property
    def rows(self) -> list[Row]:
        return list(chain.from_iterable(self.rollouts))

    @cached_property
    def longest(self) -> int:
        return max(row.length for row in self.rows)

    @property
    def computed(self) -> int:
        """Return the number of computed tokens, padding included."""
        return len(self.rows) * self.longest if self.lanes is None else self.lanes.computed

    def cost(self, limits: PassLimits) -> float:
        """Return the cost in tokens. Without trees the last token of a row and half of its pairs are left out."""
        if self.lanes is not None:
            return self.lanes.cost(limits.pairs)
        T, pairs = self.longest, limits.pairs or math.inf
        return len(self.rows) * (T - 1) * (1 + T / 2 / pairs)

    def micro_batch(self, pad_id: int, device: torch.device | str = "cpu") -> MicroBatch:
        """Right-pad the rows, or lay out their trees."""
        rows = self.rows
        B, T = len(rows), self.longest
        ids = np.full((B, T), pad_id, dtype=np.int64)
        mask = np.zeros((B, T), dtype=bool)
        logp, teacher = np.zeros((B, T), dtype=np.float32), np.zeros((B, T), dtype=np.float32)
        for b, row in enumerate(rows):
            rollout, p = row.rollout, len(row.rollout.prompt_ids)
            ids[b, :p] = rollout.prompt_ids
            ids[b, p : row.length] = rollout.token_ids
            mask[b, p : row.length] = rollout.action_mask
            logp[b, p : row.length] = rollout.sampler_logp
            if row.teacher_logp is not None:
                teacher[b][mask[b]] = row.teacher_logp
        number_B = [number for number, rollout in enumerate(self.rollouts) for _ in rollout]
        return MicroBatch(
            input_ids_BT=torch.from_numpy(ids).to(device),
            mask_BT=torch.from_numpy(mask).to(device),
            sampler_logp_BT=torch.from_numpy(logp).to(device),
            advantages_B=torch.tensor([row.advantage for row in rows], dtype=torch.float64, device=device),
            row_weight_B=torch.tensor([row.weight for row in rows], dtype=torch.float64, device=device),
            rollout_B=None if len(self.rollouts) == B else torch.tensor(number_B, device=device),
            trees=None if self.lanes is None else self._trees(self.lanes, mask, device),
            teacher_logp_BT=None if rows[0].teacher_logp is None else torch.from_numpy(teacher).to(device),
            sampled_N=torch.from_numpy(np.flatnonzero(mask[:, 1:])).to(device),
        )

    def _trees(self, lanes: Lanes, mask_BT: np.ndarray, device: torch.device | str) -> PrefixTrees:
        """Return the trees as arrays."""
        S = lanes.width
        size = lanes.computed
        ids, positions = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        stops = np.arange(1, size + 1)  # padding attends to itself
        node_BT = np.zeros(mask_BT.shape, dtype=np.int64)
        path, end, open_lane = stops[:0], 0, -1
        for b, shared, lane in zip(lanes.order, lanes.shared, lanes.lane, strict=True):
            tokens = self.rows[b].inputs
            start = end if lane == open_lane else lane * S
            end, open_lane = start + len(tokens) - shared, lane
            path = np.concatenate([path[:shared], np.arange(start, end)])
            ids[start:end], positions[start:end] = tokens[shared:], np.arange(shared, len(tokens))
            stops[path] = end
            node_BT[b, : len(tokens)] = path
        predicting_P, predicting_N = np.unique(node_BT[:, :-1][mask_BT[:, 1:]], return_inverse=True)
        in_lanes = ids.reshape(-1, S), positions.reshape(-1, S), (stops - np.arange(size) // S * S).reshape(-1, S)
        arrays = (*in_lanes, node_BT, predicting_P, predicting_N)
        return PrefixTrees(*(torch.from_numpy(array).to(device) for array in arrays))


def packed(rows: Sequence[Row], limits: PassLimits) -> list[Packing]:
    """Group rows of similar length, longest first, or group siblings, whichever costs less; ignore pools."""
    by_length = sorted(rollouts_of(rows), key=_longest, reverse=True)
    apart = _cut(by_length, limits)
    if not limits.pairs or not rows:
        return apart
    longest: dict[tuple[int, ...], int] = {}
    for rollout in by_length:
        longest.setdefault(rollout[0].rollout.prompt_ids, _longest(rollout))

    def sibling_order(rollout: Sequence[Row]) -> tuple[int, bytes]:
        return -longest[rollout[0].rollout.prompt_ids], rollout[0].sort_key

    sharing = _divided(sorted(by_length, key=sibling_order), limits)
    return sharing if _cost(sharing, limits) < _cost(apart, limits) else apart


def _longest(rollout: Sequence[Row]) -> int:
    return max(row.length for row in rollout)


def _cut(rollouts: Sequence[Sequence[Row]], limits: PassLimits) -> list[Packing]:
    """Split rollouts, longest first, into packings that share nothing, each as large as the limits allow."""
    parts: list[list[Sequence[Row]]] = []
    longest = count = tokens = 0
    for rollout in rollouts:
        count, tokens = count + len(rollout), tokens + sum(row.length for row in rollout)
        if not parts or count * longest > limits.tokens or count * longest - tokens > limits.pass_tokens:
            parts.append([])
            longest, count, tokens = _longest(rollout), len(rollout), sum(row.length for row in rollout)
        parts[-1].append(rollout)
    return [Packing(part) for part in parts]


def _divided(rollouts: Sequence[Sequence[Row]], limits: PassLimits) -> list[Packing]:
    """Split rollouts, those with the longest siblings first, by the token limit and where that costs less."""
    parts: list[Packing] = []
    while (whole := Packing.sharing(rollouts, limits)).computed > limits.tokens and len(rollouts) > 1:
        cut = max(len(rollouts) // -(-whole.computed // limits.tokens), 1)
        parts += _divided(rollouts[:cut], limits)  # at most half of them, so calls are nested a few deep
        rollouts = rollouts[cut:]
    cut = _length_cut(whole, limits)
    if cut:
        shorter = _divided(rollouts[:cut], limits) + _divided(rollouts[cut:], limits)
        if _cost(shorter, limits) < _cost([whole], limits):
            return parts + shorter
    return [*parts, whole]


def _length_cut(packing: Packing, limits: PassLimits) -> int:
    """Return the rollout from which on the others are enough shorter to pay for a pass; 0: there is none."""
    longest_R = np.array([_longest(rollout) for rollout in packing.rollouts])
    rest_R = np.maximum.accumulate(longest_R[::-1])[::-1]
    # A shorter row has less padding, and a node in a narrower lane attends to less.
    each = (len(packing.rows) if packing.lanes is None else packing.lanes.computed / limits.pairs) / len(longest_R)
    saved_R = each * np.arange(len(longest_R), 0, -1) * (longest_R.max() - rest_R)
    return int(saved_R.argmax()) if saved_R.max() > limits.pass_tokens else 0


def _cost(packings: Sequence[Packing], limits: PassLimits) -> float:
    """Return the cost of computing these packings, in tokens."""
    return sum(packing.cost(limits) + limits.pass_tokens for packing in packings)


def collate(
    rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu", limits: PassLimits = NO_LIMIT
) -> MicroBatch:
    """Return rows in this order as one micro-batch, of any size."""
    return Packing.sharing(rollouts_of(rows), limits).micro_batch(pad_id, device)


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
