"""From micro-batches to log-probabilities: beginnings computed once, unusual heads, padded vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from winnow.learner.base import Stats
from winnow.learner.batch import PassLimits, collate, micro_batches
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.reference import frozen_copy
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain

from .learner_models import (
    SIZES,
    VOCABULARY,
    assert_equal,
    gemma2,
    gpt2,
    gradients,
    granite,
    learner_of,
    llama,
    logp_of,
    naive_logp,
    random_rows,
)

# ---------------------------------------------------------------- beginnings that rows share

ALL = 1e9
"""Pairs with which rows always share."""


def siblings(groups: int, size: int) -> list[Row]:
    """Rows of `random_rows`, `size` of them with the same prompt each; most of these begin alike."""
    rows = random_rows(n=groups * size)
    for i, row in enumerate(rows):
        first, r = rows[i // size * size].rollout, row.rollout
        r.prompt_ids = first.prompt_ids
        same = min(i % size, len(r.token_ids), len(first.token_ids))
        r.token_ids[:same] = first.token_ids[:same]
    return rows


@pytest.mark.parametrize("tokens", [40, 10_000])
@pytest.mark.parametrize("loss", [LossConfig(policy_loss=Plain()), LossConfig(beta=0.1, entropy_coef=0.05)])
def test_what_rows_share_computed_once_gives_the_same_gradient(tokens: int, loss: LossConfig) -> None:
    rows = siblings(4, 5)
    apart = micro_batches(rows, PassLimits(tokens), pad_id=0)
    assert all(b.trees is None for b in apart)
    together = micro_batches(rows, PassLimits(tokens, pairs=ALL), pad_id=0)
    assert any(b.trees is not None for b in together)
    for make in (llama, gpt2):
        expected, stats = gradients(make().double(), apart, loss, reference=make().double())
        found, found_stats = gradients(make().double(), together, loss, reference=make().double())
        assert_equal(found, expected, tolerance=1e-6 if make is llama else 1e-9)
        assert found_stats.sums == pytest.approx(stats.sums)


def test_completions_of_one_token_are_predicted_by_the_prompt() -> None:
    rows = siblings(2, 3)
    for row in rows:
        r = row.rollout
        r.token_ids, r.action_mask, r.sampler_logp = r.token_ids[:1], r.action_mask[:1], r.sampler_logp[:1]
    expected, _ = gradients(llama().double(), [collate(rows, pad_id=0)], LossConfig())
    batch = collate(rows, pad_id=0, limits=PassLimits(pairs=ALL))
    assert batch.trees is not None
    assert len(batch.trees.predicting_P) == 2
    assert_equal(gradients(llama().double(), [batch], LossConfig())[0], expected, tolerance=1e-6)


def test_windows_keep_rows_apart() -> None:
    assert learner_of(llama())._share
    assert learner_of(gpt2())._share
    assert not learner_of(gemma2())._share
    options = LearnerOptions(gradient_checkpointing=True)
    assert LocalLearner(llama(), TokenDistribution(VOCABULARY), options)._share


# ---------------------------------------------------------------- model classes


@pytest.mark.parametrize(("make", "linear"), [(llama, True), (gemma2, False), (granite, False)])
def test_log_probs_are_those_of_the_whole_model(make: Any, linear: bool) -> None:
    model = make().double()
    learner, batch = learner_of(model), collate(random_rows(), pad_id=0)
    assert learner._own_head == linear
    torch.testing.assert_close(logp_of(learner, batch), naive_logp(model, batch), rtol=1e-9, atol=1e-9)


def test_a_cap_is_seen_in_a_model_whose_logits_are_small() -> None:
    """Near 0 a cap is the identity, to a thousandth; training would leave that range."""
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 8, "bos_token_id": 2, "initializer_range": 1e-4}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCABULARY, **sizes, final_logit_softcapping=30.0))
    assert not learner_of(model)._own_head


def test_ids_that_only_pad_the_vocabulary_have_no_probability() -> None:
    model = llama(vocab_size=VOCABULARY + 14).double()
    batch = collate(random_rows(), pad_id=0)
    ours = logp_of(learner_of(model), batch)
    torch.testing.assert_close(ours, naive_logp(model, batch), rtol=1e-9, atol=1e-9)
    assert (ours - naive_logp(model, batch, VOCABULARY + 14)).abs().max() > 1e-3


def test_reference_is_the_policy_before_training() -> None:
    model = llama().double()
    learner = learner_of(model, reference=frozen_copy(model))
    batch, stats = collate(random_rows(), pad_id=0), Stats()
    learner.forward_backward(batch, LossConfig(beta=1.0), stats)
    assert stats.sums["kl"] == pytest.approx(0, abs=1e-12)
    learner.apply(1e-2)
    learner.forward_backward(batch, LossConfig(beta=1.0), stats)
    assert stats.sums["kl"] > 1e-3
