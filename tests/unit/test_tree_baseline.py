"""The trial of baselines by prefix: unbiased, and the same rollouts in parts."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from winnow.learner.batch import PassLimits, micro_batches
from winnow.learner.rows import Row
from winnow.methods.correct.truncate import Truncate
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss.plain import Plain

from .learner_models import assert_equal, gpt2, gradients, random_rows


@pytest.fixture(autouse=True)
def prototypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).resolve().parents[2] / "benchmarks"), *sys.path])


def test_the_baselines_of_prefixes_leave_the_expected_gradient_as_it_is() -> None:
    """Enumerated: three rollouts of three tokens of two, under a policy with a logit for each prefix."""
    from prototypes.tree_baseline import token_baselines

    rng = np.random.default_rng(0)
    sequences = [np.array(s) for s in itertools.product((0, 1), repeat=3)]
    prefixes = [s for n in range(3) for s in itertools.product((0, 1), repeat=n)]
    up = dict(zip(prefixes, rng.uniform(0.2, 0.8, len(prefixes)), strict=True))  # probability of token 1 after it
    reward = {tuple(s): float(rng.integers(0, 2)) for s in sequences}

    def probability(s: np.ndarray) -> float:
        return float(np.prod([up[tuple(s[:t])] if s[t] else 1 - up[tuple(s[:t])] for t in range(3)]))

    def score(s: np.ndarray, by_token: np.ndarray) -> np.ndarray:
        g = np.zeros(len(prefixes))
        for t in range(3):
            g[prefixes.index(tuple(s[:t]))] += by_token[t] * (s[t] - up[tuple(s[:t])])  # of the logit
        return g

    expected = sum(3 * probability(s) * score(s, np.full(3, reward[tuple(s)])) for s in sequences)
    found = np.zeros(len(prefixes))
    for group in itertools.product(sequences, repeat=3):
        p = float(np.prod([probability(s) for s in group]))
        rewards = [reward[tuple(s)] for s in group]
        gradient = np.zeros(len(prefixes))
        for s, r, pieces in zip(group, rewards, token_baselines(group, rewards, prior=1.0), strict=True):
            by_token = np.array([next(b for end, b in pieces if t < end) for t in range(3)])
            gradient += score(s, r - by_token)
        found += p * gradient
    np.testing.assert_allclose(found, expected, atol=1e-12)


def siblings() -> list[Row]:
    """Of one prompt; the second and third share the first tokens of the first."""
    rows = random_rows(n=4)
    first = rows[0].rollout
    for row, shared, reward in zip(rows, (len(first.token_ids), 2, 1, 0), (1.0, 0.0, 1.0, 0.0), strict=True):
        row.rollout.prompt_ids, row.rollout.reward = first.prompt_ids, reward
        n = min(shared, len(row.rollout.token_ids))
        row.rollout.token_ids[:n] = first.token_ids[:n]
    return rows


@pytest.mark.parametrize("loss", [LossConfig(), LossConfig(policy_loss=Plain(), correction=Truncate())])
def test_a_rollout_in_parts_has_the_gradient_of_the_whole_one(loss: LossConfig) -> None:
    from prototypes.tree_baseline import cut

    def gradient(rows: list[Row]) -> list[torch.Tensor]:
        batches = micro_batches([replace(row, advantage=1.0) for row in rows], PassLimits(pairs=1e9), pad_id=0)
        return gradients(gpt2().double(), batches, loss)[0]

    rows = siblings()
    parts = cut(rows, prior=1.0)
    assert len(parts) > len(rows)
    assert_equal(gradient(parts), gradient(rows))


def test_a_token_is_compared_with_the_rollouts_that_share_all_before_it() -> None:
    from prototypes.tree_baseline import token_baselines

    tokens = [np.array(t) for t in ([1, 2, 3, 4], [1, 2, 5], [1, 6], [7])]
    pieces = token_baselines(tokens, [1.0, 0.0, 1.0, 0.0], prior=1.0)
    at_second = (1 / 3 + 0 + 1) / 3  # two siblings share the first token
    at_third = (at_second + 0) / 2  # one shares the first two
    assert [end for end, _ in pieces[0]] == [1, 2, 3, 4]
    assert [b for _, b in pieces[0]] == pytest.approx([1 / 3, at_second, at_third, at_third])  # alone after the third
    assert pieces[3] == [(1, pytest.approx(2 / 3))]
