"""Gradients of all rollouts from one backward pass, against autograd one rollout at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from winnow.batch import MicroBatch, Pool, Row, collate, micro_batches
from winnow.learner import grad_norms
from winnow.learner.base import Stats
from winnow.learner.local import LearnerOptions, LocalLearner
from winnow.learner.logprob import TokenDistribution
from winnow.learner.pooled import Batched
from winnow.loss import LossConfig

from .learner_models import SIZES, VOCABULARY, gpt2, llama, peaked, random_rows

PLAIN = LossConfig(policy_loss="plain")


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


def pooled_rows(seed: int = 0, n: int = 9, pools: int = 3) -> list[Row]:
    rewards = np.random.default_rng(seed).random(n)
    rows = random_rows(seed, n)
    return [replace(row, advantage=float(rewards[i]), pool=Pool(i % pools, "gradient")) for i, row in enumerate(rows)]


def naive(learner: LocalLearner, rows: list[Row], loss: LossConfig) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Gradient, norms by row, baselines by pool: every rollout on its own, in plain autograd."""
    found = []
    for row in rows:
        batch = collate([replace(row, advantage=1.0, pool=None)], pad_id=0)
        total = learner._loss(batch, loss, Stats())
        grads = torch.autograd.grad(total, list(learner._params.values()), allow_unused=True)
        found.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(learner._params.values(), grads, strict=True)]
        )
    norms = np.array([sum(float(g.square().sum()) for g in gs) for gs in found])
    rewards, pools = np.array([r.advantage for r in rows]), np.array([r.pool.number for r in rows])
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


@pytest.mark.parametrize("pass_cost", [0.0, 1e9])
@pytest.mark.parametrize("budget", [20, 60, 10_000])
@pytest.mark.parametrize("name", list(MODELS))
def test_one_backward_pass_is_as_good_as_one_for_each_rollout(
    name: str, budget: int, pass_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_norms, "PASS_COST", pass_cost)
    learner = learner_of(MODELS[name]().double())
    assert isinstance(learner._pooled, Batched)
    rows = pooled_rows()
    stats = update(learner, micro_batches(rows, budget, pad_id=0), PLAIN)
    assert_same(learner, rows, PLAIN, stats, 1e-6)
