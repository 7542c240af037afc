"""Prefix trees: what each node attends to is the beginning of its rows, and no beginning is there twice."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.learner.batch import TREE_GRAIN, Packing, PassLimits, PrefixTrees, best_lanes, collate, packed
from winnow.learner.rows import Row
from winnow.types import Rollout


def row(prompt: tuple[int, ...], tokens: list[int], actions: list[bool] | None = None) -> Row:
    """A row; all its tokens are actions unless said otherwise."""
    n, mask = len(tokens), np.ones(len(tokens), bool) if actions is None else np.array(actions, bool)
    rollout = Rollout(0, prompt, np.array(tokens, np.int64), mask, np.zeros(n, np.float32), np.zeros(n, np.int32))
    return Row(rollout, 1.0, 1.0)


def trees_of(rows: list[Row], limits: PassLimits) -> PrefixTrees:
    """The trees of these rows, whether they cost less or not."""
    trees = Packing([[one] for one in rows], best_lanes(rows, limits)).micro_batch(0).trees
    assert trees is not None
    return trees


rows_strategy = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=12)),
    min_size=1,
    max_size=12,
)


@given(drawn=rows_strategy, pairs=st.sampled_from([1.0, 8.0, math.inf]))
def test_a_node_attends_to_the_beginning_of_its_rows(
    drawn: list[tuple[int, list[tuple[int, bool]]]], pairs: float
) -> None:
    prompts = [(7,), (8, 9), (7, 7, 7)]
    rows = [row(prompts[p], [t for t, _ in said], [a for _, a in said]) for p, said in drawn]
    trees = trees_of(rows, PassLimits(pairs=pairs))
    S = trees.input_ids_US.shape[1]
    assert S % TREE_GRAIN == 0
    ids, seen = trees.input_ids_US.flatten(), trees.mask(torch.float32)[:, 0] == 0
    for b, one in enumerate(rows):
        inputs = one.inputs
        assert inputs.tolist() == [*one.rollout.prompt_ids, *one.rollout.token_ids.tolist()][: len(inputs)]
        assert (trees.node_BT[b, len(inputs) :] == 0).all()
        path = trees.node_BT[b, : len(inputs)]
        assert ids[path].tolist() == inputs.tolist()
        assert trees.position_ids_US.flatten()[path].tolist() == list(range(len(inputs)))
        for k, node in enumerate(path.tolist()):
            u, at = divmod(node, S)
            assert (seen[u, at].nonzero().flatten() + u * S).tolist() == path[: k + 1].tolist()
    assert seen.any(dim=2).all(), "padding attends to something"
    sampled = [
        (b, t) for b, r in enumerate(rows) for t in np.flatnonzero(r.rollout.action_mask) + len(r.rollout.prompt_ids)
    ]
    predicting = [int(trees.node_BT[b, t - 1]) for b, t in sampled]
    assert trees.predicting_P[trees.predicting_N].tolist() == predicting
    assert trees.predicting_P.tolist() == sorted(set(predicting))
    if pairs == math.inf:
        beginnings = {tuple(r.inputs[:n].tolist()) for r in rows for n in range(1, len(r.inputs) + 1)}
        assert trees.input_ids_US.numel() - len(beginnings) < TREE_GRAIN


def test_a_row_predicts_its_last_action_from_the_token_before() -> None:
    assert row((1, 2), [3, 4, 5]).inputs.tolist() == [1, 2, 3, 4]
    assert row((1, 2), [3, 4, 5], [True, False, False]).inputs.tolist() == [1, 2]
    assert row((1, 2), [3, 4], [False, False]).inputs.tolist() == [1, 2]


def test_lanes_are_as_wide_as_attention_to_others_costs_less_than_it_saves() -> None:
    rows = [row(tuple(range(10)), [100 * i + j for j in range(200)]) for i in range(8)]
    lanes = {pairs: best_lanes(rows, PassLimits(pairs=pairs)) for pairs in (10.0, 2e4, math.inf)}
    assert lanes[10.0].lane == list(range(8))
    assert lanes[math.inf].lane == [0] * 8
    assert lanes[math.inf].width == 1608, "10 + 8 * 199 and padding"
    assert lanes[2e4].lane == [0, 0, 1, 1, 2, 2, 3, 3]


def test_much_shorter_rows_get_a_pass_of_their_own() -> None:
    """With the longest one in the lane, each would attend to a mask as wide."""
    rows = [row((i, 2), [7] * 20 + [j, 5]) for i in range(100) for j in range(4)]
    parts = packed([*rows, row((900,), list(range(900)))], PassLimits(pass_tokens=100, pairs=500.0))
    assert [len(part.rows) for part in parts] == [1, 400]
    assert parts[1].lanes is not None
    assert parts[1].lanes.width < 200


@pytest.mark.parametrize("length", [5, 50, 500])
def test_rows_with_nothing_in_common_are_computed_apart(length: int) -> None:
    """Trees would bring them a mask for nothing."""
    limits = PassLimits.for_model(16_384, 1_000_000, share=True)
    one = row((1, 2), list(range(length)))
    distinct = [row((i, 2), list(range(length - i % 2))) for i in range(5)]
    far = [row((1, 2), [100 * i + j for j in range(500)]) for i in range(4)]
    assert [collate(rows, 0, limits=limits).trees for rows in ([one], distinct, far)] == [None] * 3
    assert collate([one, one], 0, limits=limits).trees is not None


def test_siblings_share_in_the_order_that_makes_most_of_it() -> None:
    """Of equal length but in turn different, neighbors have little in common; sorted, they have."""
    limits = PassLimits(pairs=math.inf)
    rows = [row((1, 2), [i % 2] * 20 + [5 + i, 9]) for i in range(6)]
    (part,) = packed(rows, limits)
    assert part.computed == 2 + 2 * 20 + 6
    assert packed(rows, PassLimits())[0].lanes is None


def test_rows_of_several_segments_share_with_the_same_segment_of_siblings() -> None:
    first, second = row((1, 2, 3), [4, 5, 6]), row((7, 8, 9), [4, 5])
    trees = trees_of([first, second, first, second], PassLimits(pairs=math.inf))
    assert trees.input_ids_US.numel() == 2 * TREE_GRAIN
    assert trees.node_BT[0].tolist() == trees.node_BT[2].tolist()
    assert trees.node_BT[1].tolist() == trees.node_BT[3].tolist()


@pytest.mark.parametrize("parameters", [1, 600_000, 135_000_000, 7_000_000_000])
def test_larger_models_share_more(parameters: int) -> None:
    assert PassLimits.for_model(1, parameters, share=False).pairs == 0
    smaller, larger = (PassLimits.for_model(1, n, share=True).pairs for n in (parameters, 8 * parameters))
    assert larger == pytest.approx(2 * smaller)
