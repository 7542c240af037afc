"""Votes: by hand, and what weighs them."""

from __future__ import annotations

import numpy as np
import pytest

from winnow.env.base import Answering
from winnow.env.rewards.math import same_answers
from winnow.methods.gate.arrol.head import HeadWeights
from winnow.rollout.evaluate import rank_weights, weighted_vote
from winnow.study.vote import _interval, by_head
from winnow.tasks.countdown import CountdownConfig
from winnow.types import Rollout


def test_ranks_are_rescaled_and_ties_share() -> None:
    np.testing.assert_allclose(rank_weights([3.0, 1.0, 2.0]), [1, 0, 0.5])
    np.testing.assert_allclose(rank_weights([1.0, 1.0, 2.0]), [0.25, 0.25, 1])
    np.testing.assert_allclose(rank_weights([5.0]), [1])
    np.testing.assert_allclose(rank_weights([7.0, 7.0]), [0.5, 0.5])
    np.testing.assert_allclose(rank_weights([-np.inf, 0.0, np.inf]), [0, 0.5, 1])
    assert len(rank_weights([])) == 0
    with pytest.raises(ValueError, match="list of numbers"):
        rank_weights([1.0, float("nan")])


def test_votes_are_counted_by_weight() -> None:
    assert weighted_vote(["a", "b", "b"], [1, 1, 1]) == "b"
    assert weighted_vote(["a", "b", "b"], [3, 1, 1]) == "a"
    assert weighted_vote(["b", "a", None, None], [1, 1, 5, 5]) == "b", "the first of equals; none is no answer"
    assert weighted_vote([None, None], [1, 1]) is None
    assert weighted_vote([], []) is None
    for wrong in ([-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="finite and not negative"):
            weighted_vote(["a", "b"], wrong)
    with pytest.raises(ValueError, match="shorter"):
        weighted_vote(["a", "b"], [1.0])


def rollout(hidden: np.ndarray | None = None) -> Rollout:
    logp, versions = np.full(1, -1.0, np.float32), np.zeros(1, np.int32)
    return Rollout(0, (1,), np.arange(1), np.ones(1, bool), logp, versions, last_hidden=hidden)


def test_weights_of_candidates() -> None:
    head = HeadWeights()
    np.testing.assert_allclose(by_head(head)([rollout(), rollout(np.ones(3))]), [0, 1])
    np.testing.assert_allclose(by_head(head)([rollout(np.full(3, np.nan)), rollout(np.ones(3))]), [0, 1])


def test_answers_of_tasks() -> None:
    task = CountdownConfig(train_size=4, test_size=1).build()
    assert isinstance(task, Answering)
    texts = ["3 + 5 = 8 , 8 * 2 = 16", "5 + 3 = 8,2 * 8 = 16", "8 - 3 = 5 , x", ""]
    assert task.answers(task.train[0], texts) == ["3+5=8,2*8=16", "3+5=8,2*8=16", "8-3=5,x", None]
    tagged = CountdownConfig(train_size=4, test_size=1, style="expression").build()
    assert tagged.answers(tagged.train[0], ["<answer>3 + 5</answer>", "3+5"]) == ["3+5", None]


def test_mathematical_answers_are_the_same_when_their_values_are() -> None:
    pytest.importorskip("math_verify")
    texts = [
        r"so \boxed{1/2}",
        "Answer: 0.5",
        "#### 3",
        r"\boxed{\frac{1}{2}}",
        "I do not know",
        "Answer: 3.0",
        "Answer: x",
    ]
    assert same_answers(texts) == ["1/2", "1/2", "3", "1/2", None, "3", "x"]


def test_ranks_are_of_a_list() -> None:
    with pytest.raises(ValueError, match="list of numbers"):
        rank_weights(np.zeros((2, 2)))


def test_a_share_of_votes_has_an_interval_within_0_and_1() -> None:
    """All right on a few prompts is no certainty."""
    found = _interval([1.0] * 8, [1.0] * 7 + [0.0])
    assert (found["share"], found["high"], found["difference"]) == (1.0, 1.0, 0.125)
    assert 0.6 < found["low"] < 0.7
    low, high = (_interval([1.0, 1.0, 0.0], [0.0] * 3)[name] for name in ("low", "high"))
    assert 0 < low < 2 / 3 < high < 1
