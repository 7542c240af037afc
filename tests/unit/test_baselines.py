"""REINFORCE++ and ReMax: advantages that look beyond one group's rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.learner.rows import rows_of
from winnow.methods.advantage import ADVANTAGES
from winnow.methods.group_kind import GroupJudge
from winnow.types import Group

from ..builders.greedy import reward, with_greedy
from ..builders.groups import make_group

member = st.tuples(reward, st.integers(0, 9))
batches = st.lists(st.lists(member, min_size=1, max_size=6), min_size=1, max_size=4)


def groups_of(batch: list[list[tuple[float | None, int]]]) -> list[Group]:
    return [make_group(n, [r for r, _ in group], [t for _, t in group]) for n, group in enumerate(batch)]


@given(batch=batches)
def test_reinforce_pp_is_the_z_score_over_all_tokens(batch: list[list[tuple[float | None, int]]]) -> None:
    tokens = [r for group in batch for r, n in group for _ in range(n) if r is not None]
    mean = math.fsum(tokens) / max(len(tokens), 1)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / max(len(tokens), 1))
    distinct = {r for group in batch for r, n in group if r is not None and n}
    expected = [
        [math.nan if r is None else 0.0 if len(distinct) < 2 else (r - mean) / (std + 1e-6) for r, _ in group]
        for group in batch
    ]
    got = ADVANTAGES["reinforce_pp"]().of_batch(groups_of(batch))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-7)


def test_reinforce_pp_sees_other_groups_and_lengths() -> None:
    advantage = ADVANTAGES["reinforce_pp"]()
    solved, failed = make_group(0, [1.0, 1.0]), make_group(1, [0.0, 0.0])
    a, b = advantage.of_batch([solved, failed])
    np.testing.assert_allclose([a, b], [[1, 1], [-1, -1]], rtol=1e-5)
    (alone,) = advantage.of_batch([make_group(0, [1.0, 0.0], [3, 1])])
    np.testing.assert_allclose(alone, [0.25 / 0.1875**0.5, -0.75 / 0.1875**0.5], rtol=1e-5)
    (failed,) = advantage.of_batch([make_group(0, [1.0, 0.0, None])])
    np.testing.assert_allclose(failed, [1.0, -1.0, np.nan], rtol=1e-5)


@given(rewards=st.lists(reward, min_size=1, max_size=6), greedy=st.floats(-10, 10))
def test_remax_subtracts_the_greedy_reward(rewards: list[float | None], greedy: float) -> None:
    group = with_greedy(make_group(0, rewards), greedy)
    assert group.greedy_reward() == greedy
    (got,) = ADVANTAGES["remax"]().of_batch([group])
    expected = [math.nan if r is None else r - greedy for r in rewards]
    np.testing.assert_array_equal(got, [*expected, math.nan])


def test_remax_without_its_baseline_is_refused() -> None:
    group = with_greedy(make_group(3, [1.0, 0.0]), None)
    assert "the greedy baseline has no reward" in str(GroupJudge(advantage=ADVANTAGES["remax"]()).refusal(group))


def test_a_greedy_rollout_is_never_a_row_nor_in_a_statistic() -> None:
    plain = make_group(0, [1.0, 0.0, None], [2, 4, 6])
    group = with_greedy(plain, 5.0)
    assert np.isnan(group.rewards()[-1])
    assert group.siblings == plain.rollouts
    for name, cls in ADVANTAGES.items():
        rows = rows_of([group], cls(), "dapo", max_completion_length=8)
        assert [row.rollout.sibling for row in rows] == [0, 1], name
        assert rows[0].weight == pytest.approx(1 / 6)
        if not cls.greedy_baseline:
            without = rows_of([plain], cls(), "dapo", max_completion_length=8)
            assert [row.advantage for row in rows] == [row.advantage for row in without]
    assert plain.greedy_reward() is None
