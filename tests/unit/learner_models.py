"""Tiny models, random rows and gradients, for the tests of the learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from winnow.base.noise import noise_key
from winnow.engine.base import Finished, Request, SamplingParams
from winnow.engine.local.engine import LocalEngine
from winnow.learner.base import Stats
from winnow.learner.batch import MicroBatch, collate
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.types import Rollout

WORDS = 30
VOCABULARY = WORDS + 2
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def peaked(model: Any) -> Any:
    """Scaled up, so that its distributions are far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return model.eval()


def llama(vocab_size: int = VOCABULARY, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return peaked(LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **SIZES | options)))


def gemma2() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 8, "bos_token_id": 2}
    config = Gemma2Config(vocab_size=VOCABULARY, **sizes, final_logit_softcapping=1.5, sliding_window=64)
    return peaked(Gemma2ForCausalLM(config))


def gpt2() -> GPT2LMHeadModel:
    """Learned absolute positions, one class whose forward is its own."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=20, bos_token_id=1, eos_token_id=1
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return peaked(GPT2LMHeadModel(config))


def granite() -> GraniteForCausalLM:
    torch.manual_seed(0)
    return peaked(GraniteForCausalLM(GraniteConfig(vocab_size=VOCABULARY, **SIZES, logits_scaling=8.0)))


def learner_of(model: Any, reference: Any = None, tokens: int = 16_384, **distribution: Any) -> LocalLearner:
    options = LearnerOptions(tokens_per_microbatch=tokens)
    return LocalLearner(model, TokenDistribution(VOCABULARY, **distribution), options, reference)


def random_rows(seed: int = 0, n: int = 6, advantages: tuple[float, ...] = (1.0, -0.5, 0.0, 2.0)) -> list[Row]:
    """Rollouts of random tokens, lengths and log-probabilities; some tokens are the environment's."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        length = int(rng.integers(3, 12))
        mask = rng.random(length) < 0.8
        mask[0] = True
        rollout = Rollout(
            sibling=i,
            prompt_ids=tuple(rng.integers(0, VOCABULARY, int(rng.integers(1, 6))).tolist()),
            token_ids=rng.integers(0, VOCABULARY, length),
            action_mask=mask,
            sampler_logp=np.where(mask, rng.normal(-3, 0.5, length), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        rows.append(Row(rollout, advantages[i % len(advantages)], 1 / (5 + i)))
    return rows


def gradients(
    model: Any, batches: list[MicroBatch], loss: LossConfig, **options: Any
) -> tuple[list[torch.Tensor], Stats]:
    learner, stats = learner_of(model, **options), Stats()
    for batch in batches:
        learner.forward_backward(batch, loss, stats)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], stats


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-9) -> None:
    """Within `tolerance` of the largest element. (Llama's norm rounds to float32, which sums of siblings see.)"""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance * (1e-3 + float(other.detach().abs().max())))


def logp_of(learner: LocalLearner, batch: MicroBatch) -> torch.Tensor:
    with torch.no_grad():
        return learner._logp(batch)[0]


def naive_logp(model: Any, batch: MicroBatch, n_tokens: int = VOCABULARY) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids_BT).logits[:, :-1, :n_tokens]
    logp = logits.log_softmax(-1).gather(-1, batch.input_ids_BT[:, 1:, None])[..., 0]
    return logp * batch.mask_BT[:, 1:]


def generate(engine: LocalEngine, params: SamplingParams, n: int) -> list[tuple[Request, Finished]]:
    prompts = [(5, 9, 3), (7,), (11, 2, 30, 4, 8)]
    requests = {i: Request(i, prompts[i % 3], params, noise_key(0, i)) for i in range(n)}
    engine.submit(requests.values())
    finished = []
    for _ in range(200):
        finished += [(requests[e.id], e) for e in engine.step() if isinstance(e, Finished)]
        if not engine.pending:
            return finished
    raise AssertionError("the engine did not finish")


def sampled(engine: LocalEngine, params: SamplingParams, n: int) -> list[Rollout]:
    return [
        Rollout(0, request.prompt_ids, f.token_ids, np.ones(len(f.token_ids), bool), f.logp, f.versions)
        for request, f in generate(engine, params, n)
    ]


def assert_engine_agrees(engine: LocalEngine, learner: LocalLearner, params: SamplingParams) -> None:
    batch = collate([Row(rollout, 1.0, 1.0) for rollout in sampled(engine, params, n=48)], pad_id=0)
    recorded = batch.sampler_logp_BT[:, 1:]
    torch.testing.assert_close(logp_of(learner, batch), recorded, rtol=1e-4, atol=1e-4)
    assert recorded.min() < -0.5
