"""Gradients of all rollouts from one backward pass, against autograd one rollout at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from winnow.learner.base import Stats
from winnow.learner.batch import MicroBatch, PassLimits, collate, micro_batches
from winnow.learner.local import grad_norms, logprob, optimal_baseline_update, row_head
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.optimal_baseline_update import RowByRow
from winnow.learner.rows import Pool, Row, rollouts_of
from winnow.methods.correct import CORRECTIONS
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain

from .learner_models import SIZES, VOCABULARY, gemma2, gpt2, granite, llama, peaked, random_rows

PLAIN = LossConfig(policy_loss=Plain())


def qwen2() -> Any:
    torch.manual_seed(0)
    model = peaked(Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **SIZES, tie_word_embeddings=True)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    return model


def qwen3() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCABULARY, **SIZES, head_dim=8, tie_word_embeddings=False)
    return peaked(Qwen3ForCausalLM(config))


def lora() -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "llama_biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "lora": lora,
}


def pooled_rows(seed: int = 0, n: int = 9, pools: int = 3, *, binary: bool = False) -> list[Row]:
    rewards = np.random.default_rng(seed).random(n)
    if binary:
        rewards = (np.arange(n) % 2).astype(float)
    rows = random_rows(seed, n)
    return [replace(row, advantage=float(rewards[i]), pool=Pool(i % pools, "gradient")) for i, row in enumerate(rows)]


def naive(learner: LocalLearner, rows: list[Row], loss: LossConfig) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Gradient, norms by rollout, baselines by pool: every rollout on its own, in plain autograd."""
    found, rollouts = [], rollouts_of(rows)
    for segments in rollouts:
        batch = collate([replace(row, advantage=1.0, pool=None) for row in segments], pad_id=0)
        total = learner._loss(batch, loss, Stats())
        grads = torch.autograd.grad(total, list(learner._params.values()), allow_unused=True)
        found.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(learner._params.values(), grads, strict=True)]
        )
    norms = np.array([sum(float(g.square().sum()) for g in gs) for gs in found])
    rewards = np.array([segments[0].advantage for segments in rollouts])
    pools = np.array([segments[0].pool.number for segments in rollouts])
    baseline = {p: (norms * rewards)[pools == p].sum() / norms[pools == p].sum() for p in set(pools.tolist())}
    gradient = {}
    for k, name in enumerate(learner._params):
        gradient[name] = sum((rewards[i] - baseline[pools[i]]) * gs[k] for i, gs in enumerate(found))
    return gradient, np.sqrt(norms), baseline


def update(learner: LocalLearner, batches: list[MicroBatch], loss: LossConfig) -> Stats:
    stats = Stats()
    for batch in batches:
        learner.forward_backward(batch, loss, stats)
    return stats


def assert_same(learner: LocalLearner, rows: list[Row], loss: LossConfig, stats: Stats, tolerance: float) -> None:
    gradient, norms, baseline = naive(learner, rows, loss)
    scale = max(float(g.abs().max()) for g in gradient.values())
    for name, p in learner._params.items():
        got = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(got, gradient[name].to(got.dtype), rtol=0, atol=tolerance * scale, msg=name)
    np.testing.assert_allclose(np.sort(torch.cat(stats.row_norm_B).numpy()), np.sort(norms), rtol=tolerance)
    found = np.sort(torch.cat(stats.baselines).numpy())
    np.testing.assert_allclose(found, sorted(baseline.values()), rtol=tolerance)


def learner_of(model: Any, **options: Any) -> LocalLearner:
    return LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions(**options))


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(("budget", "pass_cost", "rewards"), [(60, -1e9, "binary"), (10_000, 1e9, "any")])
@pytest.mark.parametrize("name", list(MODELS))
def test_one_backward_pass_is_as_good_as_one_for_each_rollout(
    name: str, budget: int, pass_cost: float, rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_norms, "PASS_COST", pass_cost)
    learner = learner_of(MODELS[name]().double())
    assert learner._batched is not None
    rows = pooled_rows(binary=rewards == "binary")
    stats = update(learner, micro_batches(rows, PassLimits(budget), pad_id=0), PLAIN)
    assert_same(learner, rows, PLAIN, stats, 1e-6)


@pytest.mark.cases(one_in=7)
@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(("budget", "pass_cost"), [(20, -1e9), (40, 0.0), (40, 1e9)])
def test_pools_may_be_cut_anywhere(
    budget: int, pass_cost: float, binary: bool, pools: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_norms, "PASS_COST", pass_cost)
    learner = learner_of(llama(tie_word_embeddings=True).double())
    rows = pooled_rows(1, pools=pools, binary=binary)
    batches = micro_batches(rows, PassLimits(budget), pad_id=0)
    assert len(batches) > 1
    for _ in range(2):
        learner.model.zero_grad()
        stats = update(learner, batches, PLAIN)
    assert_same(learner, rows, PLAIN, stats, 1e-6)


@pytest.mark.cases(one_in=5)
@pytest.mark.parametrize(("budget", "at_once"), [(60, 10_000), (10_000, 10_000), (10_000, 4)])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_segments_of_a_rollout_have_one_norm(
    name: str, budget: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (logprob, row_head):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", at_once * VOCABULARY)
    learner = learner_of(MODELS[name]().double())
    assert learner._batched is not None
    monkeypatch.setattr(learner, "_row_by_row", learner._batched)
    of_rollout = [0, 1, 1, 1, 2, 2, 3, 4, 4]
    rows, first = pooled_rows(4), [of_rollout.index(number) for number in of_rollout]
    rows = [
        replace(row, advantage=rows[i].advantage, pool=rows[i].pool, weight=rows[i].weight, rollout_number=number)
        for row, i, number in zip(rows, first, of_rollout, strict=True)
    ]
    loss = LossConfig(policy_loss=Plain(), correction=CORRECTIONS["truncate"](level="sequence", high=3.0))
    assert_same(learner, rows, loss, update(learner, micro_batches(rows, PassLimits(budget), pad_id=0), loss), 1e-6)


@pytest.mark.parametrize(("at_once", "tied"), [(4, False), (4, True), (40, True)])
def test_a_large_vocabulary_is_taken_in_pieces(at_once: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (logprob, row_head):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", at_once * VOCABULARY)
    learner = learner_of(llama(tie_word_embeddings=tied, vocab_size=VOCABULARY + 5).double())
    rows = pooled_rows(2)
    assert_same(
        learner, rows, PLAIN, update(learner, micro_batches(rows, PassLimits(10_000, pairs=1e9), pad_id=0), PLAIN), 1e-6
    )


@pytest.mark.parametrize(
    ("correction", "distribution"),
    [
        ({"name": "truncate", "level": "token", "low": 0.5, "high": 2.0}, {"temperature": 0.7}),
        ({"name": "truncate", "level": "sequence", "high": 3.0}, {"top_p": 0.8}),
        ({"name": "mask", "level": "geometric", "low": 0.1, "high": 10.0}, {"top_k": 5}),
    ],
)
def test_weights_and_distribution_are_those_of_the_loss(
    correction: dict[str, Any], distribution: dict[str, Any]
) -> None:
    options = dict(correction)
    loss = replace(PLAIN, correction=CORRECTIONS[options.pop("name")](**options))
    learner = LocalLearner(llama().double(), TokenDistribution(VOCABULARY, **distribution), LearnerOptions())
    rows = pooled_rows(3)
    with torch.no_grad():  # a sampler not too far off, so that some weights are inside of the bounds
        for row in rows:
            logp = learner.batch_logp(collate([row], pad_id=0))[0, -len(row.rollout.token_ids) :].numpy()
            row.rollout.sampler_logp[:] = logp + 0.5 * np.sin(np.arange(len(logp)) + row.rollout.sibling)
    stats = update(learner, micro_batches(rows, PassLimits(60), pad_id=0), loss)
    assert_same(learner, rows, loss, stats, 1e-6)
    assert stats.sums["correction/clipped_of"] > 0


def with_long_prompts(rows: list[Row]) -> list[Row]:
    """A prompt of 199 or 200 tokens for each pool."""
    prompts = [
        tuple(np.random.default_rng(p).integers(0, VOCABULARY, 200 - p % 2).tolist())
        for p in range(1 + max(row.pool.number for row in rows))
    ]
    return [replace(r, rollout=replace(r.rollout, prompt_ids=prompts[r.pool.number])) for r in rows]


def test_rows_with_the_same_long_prompt_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal_baseline_update, "ALONE_TOKENS", 1_000)
    learner = learner_of(llama().double())
    rows = with_long_prompts(pooled_rows(4))
    (batch,) = micro_batches(rows, PassLimits(10_000, pairs=1e9), pad_id=0)
    assert batch.trees is None
    assert_same(learner, rows, PLAIN, update(learner, [batch], PLAIN), 1e-5)


def test_long_prompts_over_a_budget_and_completions_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal_baseline_update, "ALONE_TOKENS", 1_000)
    learner = learner_of(llama(tie_word_embeddings=True).double())
    rows = with_long_prompts(pooled_rows(6))
    batches = micro_batches(rows, PassLimits(1_500, pairs=1e9), pad_id=0)
    assert len(batches) > 1
    assert_same(learner, rows, PLAIN, update(learner, batches, PLAIN), 1e-6)
    learner.model.zero_grad()
    for row in rows:
        r = row.rollout
        r.token_ids, r.action_mask, r.sampler_logp = r.token_ids[:1], np.ones(1, bool), r.sampler_logp[:1]
    assert_same(
        learner, rows, PLAIN, update(learner, micro_batches(rows, PassLimits(10_000, pairs=1e9), pad_id=0), PLAIN), 1e-6
    )


def test_one_precision_is_enough() -> None:
    rows = pooled_rows(5)
    learner = learner_of(llama())
    assert_same(learner, rows, PLAIN, update(learner, micro_batches(rows, PassLimits(60), pad_id=0), PLAIN), 1e-5)
    half = learner_of(llama(), compute_dtype=torch.bfloat16)
    assert half._batched is not None
    stats = update(half, micro_batches(rows, PassLimits(60), pad_id=0), PLAIN)
    assert_same(half, rows, PLAIN, stats, 0.05)


class Scaled(torch.nn.Module):
    """A layer with a parameter of a kind that nothing knows."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.by = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.by


def scaled() -> Any:
    model = llama()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    return model


def shared_layer() -> Any:
    """One feed-forward module in two places."""
    model = llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [(llama, {"gradient_checkpointing": True}), (gemma2, {}), (scaled, {}), (granite, {}), (shared_layer, {})],
)
def test_other_models_take_one_backward_pass_a_rollout(make: Callable[[], Any], options: dict[str, Any]) -> None:
    learner = learner_of(make().double(), **options)
    assert learner._batched is None
    rows = pooled_rows(6)
    assert_same(learner, rows, PLAIN, update(learner, micro_batches(rows, PassLimits(60), pad_id=0), PLAIN), 1e-6)


@pytest.mark.parametrize(("tokens", "alone"), [(60, 0), (13, 9)])
def test_blocks_of_long_rows_go_one_row_at_a_time(tokens: int, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal_baseline_update, "ALONE_TOKENS", tokens)
    learner = learner_of(llama().double())
    assert learner._batched is not None
    seen: list[int] = []
    original = RowByRow.of_rollout
    monkeypatch.setattr(RowByRow, "of_rollout", lambda *args: seen.append(1) or original(*args))
    rows = pooled_rows(9)
    assert_same(
        learner, rows, PLAIN, update(learner, micro_batches(rows, PassLimits(10_000, pairs=1e9), pad_id=0), PLAIN), 1e-6
    )
    assert len(seen) == alone


def test_the_slower_way_is_said_with_its_reason() -> None:
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM: .* one rollout at a time.*Scaled"):
        assert learner_of(scaled())._batched is None


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_what_is_not_finite_is_no_update(options: dict[str, Any]) -> None:
    learner = learner_of(llama(), **options)
    assert (learner._batched is None) == bool(options)
    rows = pooled_rows(7)
    infinite = [replace(row, weight=math.inf) if i == 3 else row for i, row in enumerate(rows)]
    with pytest.raises(FloatingPointError, match="no update was made"):
        update(learner, micro_batches(infinite, PassLimits(10_000), pad_id=0), PLAIN)
    learner.model.zero_grad()
    assert_same(learner, rows, PLAIN, update(learner, micro_batches(rows, PassLimits(60), pad_id=0), PLAIN), 1e-5)


def test_only_trainable_parameters_get_a_gradient_and_nothing_is_left_behind() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    learner = learner_of(model.double())
    assert learner._batched is not None
    rows = pooled_rows(8)
    assert_same(learner, rows, PLAIN, update(learner, micro_batches(rows, PassLimits(60), pad_id=0), PLAIN), 1e-6)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
