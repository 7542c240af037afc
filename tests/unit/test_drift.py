"""KL to the initial policy of a run that nothing holds to it, and how many completions of a group differ."""

from __future__ import annotations

import numpy as np
import pytest

from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.reference_kl import kl_to_reference
from winnow.methods.group_kind import BY_REWARDS
from winnow.record.step_metrics import Tally
from winnow.types import Group, Prompt, Rollout, Visit

from ..builders.groups import make_group
from ..builders.toy_models import PROMPT, SEQUENCES, V, model_of, toy


def test_the_mean_over_samples_is_the_divergence_a_token() -> None:
    """Every sequence in proportion to its chance: the estimate's mean is the exact divergence."""
    t = toy(on_policy=True)
    learner = LocalLearner(model_of(0), TokenDistribution(V), LearnerOptions(), model_of(2))
    exact = float((t.sampler.sum(1).exp() * (t.sampler.sum(1) - t.reference.sum(1))).sum())
    found = 0.0
    for sequence, logp in zip(SEQUENCES, t.sampler, strict=True):
        ids, ones = np.array(sequence), np.ones(2, bool)
        rollout = Rollout(0, tuple(PROMPT), ids, ones, logp.float().numpy(), 0 * ids.astype(np.int32), reward=1.0)
        failed = Rollout(1, tuple(PROMPT), ids, ones, -9 * np.ones(2, np.float32), 0 * ids.astype(np.int32))
        estimate = kl_to_reference([Group(Visit(0, 0, Prompt("p", 0, text="")), [rollout, failed])], learner)
        assert estimate is not None
        found += float(logp.sum().exp()) * 2 * estimate
    assert exact > 0.01
    assert found == pytest.approx(exact, abs=1e-6)


def test_without_rewards_there_is_no_figure() -> None:
    learner = LocalLearner(model_of(0), TokenDistribution(V), LearnerOptions(), model_of(2))
    assert kl_to_reference([make_group(0, [None, None])], learner) is None


def test_distinct_completions_are_counted_in_each_group() -> None:
    copies, different = make_group(0, [1.0, 1.0, 1.0, None]), make_group(1, [1.0, 0.0])
    for rollout in copies.rollouts:
        rollout.token_ids = np.array([1, 2, 3])
    for rollout in different.rollouts:
        rollout.token_ids = np.array([1, rollout.sibling])
    tally = Tally(BY_REWARDS)
    assert "completions/distinct" not in tally.metrics()
    tally.finished(copies)
    tally.finished(different)
    assert tally.metrics()["completions/distinct"] == pytest.approx((1 / 3 + 1) / 2)
