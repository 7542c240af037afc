"""The learner computes what the engine samples, whatever dropout a model class has and wherever it keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from winnow.engine.base import SamplingParams
from winnow.engine.local.engine import LocalEngine
from winnow.learner.base import Stats
from winnow.learner.batch import collate
from winnow.learner.local.eval_mode import WideAttention, checkpoint_layers
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import Plain
from winnow.study.warm_start import word_tokenizer

from .learner_models import (
    SIZES,
    VOCABULARY,
    WORDS,
    assert_engine_agrees,
    assert_equal,
    gradients,
    llama,
    peaked,
    random_rows,
)

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, SIZES | {"attention_dropout": 0.1}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, SIZES | {"attention_dropout": 0.1}),
    "starcoder2": (
        hf.Starcoder2ForCausalLM,
        hf.Starcoder2Config,
        SIZES | {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1, "sliding_window": None},
    ),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig,
        OPT | {"max_position_embeddings": 64, "dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.2},
    ),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2 | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
}


def make(kind: str) -> Any:
    cls, config, options = KINDS[kind]
    torch.manual_seed(0)
    return peaked(cls(config(vocab_size=VOCABULARY, **options)))


def learner(model: Any, *, checkpointing: bool = False) -> LocalLearner:
    return LocalLearner(model, TokenDistribution(VOCABULARY), LearnerOptions(gradient_checkpointing=checkpointing))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_at_lag_0_the_learner_has_the_engines_log_probabilities(kind: str, checkpointing: bool) -> None:
    """Version 0.1 left functional dropout on: differences of whole nats here."""
    model = make(kind)
    engine = LocalEngine(model, word_tokenizer([f"w{i}" for i in range(WORDS)], max_positions=64), max_length=64)
    assert_engine_agrees(engine, learner(model, checkpointing=checkpointing), SamplingParams(12))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_recomputes_layers_and_gives_the_same_gradients(kind: str) -> None:
    batch, loss = collate(random_rows(), pad_id=0), LossConfig(policy_loss=Plain())
    expected, _ = gradients(make(kind), [batch], loss)
    model, calls = make(kind), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    trained = learner(model, checkpointing=True)
    attention.register_forward_hook(count)
    trained.forward_backward(batch, loss, Stats())
    assert calls == 2, "once forward, once in the backward pass"
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], expected, tolerance=1e-5)


@pytest.mark.parametrize(("columns", "dtype"), [(512, torch.float32), (513, torch.bfloat16)])
def test_attention_of_few_columns_is_in_float32(columns: int, dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, columns, 8)
    mask = torch.zeros(4, columns, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), WideAttention():
        assert torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask).dtype == dtype


def test_checkpointing_under_bfloat16() -> None:
    batch, found = collate(random_rows(), pad_id=0), []
    for checkpointing in (False, True):
        model = llama()
        options = LearnerOptions(compute_dtype=torch.bfloat16, gradient_checkpointing=checkpointing)
        trained = LocalLearner(model, TokenDistribution(VOCABULARY), options)
        trained.forward_backward(batch, LossConfig(policy_loss=Plain()), Stats())
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(found[1], found[0], tolerance=5e-2)


def test_checkpointing_of_a_class_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient_checkpointing: Linear marks no decoder layers"):
        checkpoint_layers(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_adapters_stays_on_for_who_asked_for_it(checkpointing: bool) -> None:
    peft = pytest.importorskip("peft")
    batch = collate(random_rows(), pad_id=0)
    for rate in (0.0, 0.5):
        options = peft.LoraConfig(r=4, lora_dropout=rate, target_modules="all-linear", init_lora_weights=False)
        trained = learner(peft.get_peft_model(llama(attention_dropout=0.1), options), checkpointing=checkpointing)
        assert trained.batch_logp(batch).equal(trained.batch_logp(batch)) == (rate == 0)
