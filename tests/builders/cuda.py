"""Models, rows and kinds of update that run on the pretended device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.config.options import LoraConfig
from winnow.learner.adapters import adapted
from winnow.learner.fsdp.sharded import ShardedLearner
from winnow.learner.local.eval_mode import halve_frozen
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.reference import frozen_copy
from winnow.learner.rows import Pool, Row
from winnow.methods.correct import CORRECTIONS
from winnow.methods.loss import LossConfig
from winnow.methods.policy_loss import POLICY_LOSSES, Clip, Plain
from winnow.types import Rollout

from ..unit.engine_models import word_tokenizer

LAYERS, VOCAB = 2, 300
BF16 = {"compute_dtype": torch.bfloat16}


PLAIN = LossConfig(policy_loss=Plain())


def qwen3(vocab: int = VOCAB, heads: int = 4, kv_heads: int = 2, layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        vocab_size=vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def rows_of(groups: int = 3, size: int = 3, *, pool: Any = None, vocab: int = VOCAB) -> list[Row]:
    draws, rows = random.Random(0), []
    for number in range(groups):
        prompt = tuple(draws.randrange(2, vocab) for _ in range(draws.randint(3, 40)))
        for sibling in range(size):
            n = draws.randint(2, 60)
            mask = np.ones(n, bool)
            mask[n // 2 : n // 2 + (n > 8)] = False
            ids = np.array([draws.randrange(2, vocab) for _ in range(n)])
            rollout = Rollout(sibling, prompt, ids, mask, np.full(n, -5.0, np.float32), np.zeros(n, np.int32))
            advantage = draws.choice([0.0, 1.0] if pool else [-1.0, 1.0])
            rows.append(Row(rollout, advantage, 1 / 200, Pool(number, pool) if pool else None))
    return rows


LORA = LoraConfig(r=4)


UPDATES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": BF16,
    "float16": {"compute_dtype": torch.float16},
    "checkpointing": BF16 | {"gradient_checkpointing": True},
    "medium": {"matmul_precision": "medium"},
    "lora": BF16 | {"lora": LORA},
    "lora-half-base": BF16 | {"lora": LORA, "half_base": True, "loss": LossConfig(beta=0.1)},
    "lora-half-opob": BF16 | {"lora": LORA, "half_base": True, "pool": "gradient", "loss": PLAIN},
    "lora-dropout": BF16 | {"lora": LoraConfig(r=4, dropout=0.1), "gradient_checkpointing": True},
    "lora-alone": BF16 | {"lora": LoraConfig(r=4, merge=False), "merge_adapters": False},
    "kl": BF16 | {"reference": True, "loss": LossConfig(beta=0.1)},
    "kl-lora": BF16 | {"lora": LORA, "loss": LossConfig(beta=0.1, kl_estimator="k2")},
    "entropy": BF16 | {"loss": LossConfig(entropy_coef=0.01)},
    "gspo": BF16 | {"loss": LossConfig(policy_loss=Clip(importance_sampling_level="sequence"))},
    "filters": BF16 | {"drawn": {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.7}},
    "penalty": BF16 | {"drawn": {"repetition_penalty": 1.2}},
    "temperature": BF16 | {"drawn": {"temperature": 0.7}},
    "otb": BF16 | {"pool": "energy", "loss": PLAIN},
    "opob": BF16 | {"pool": "gradient", "loss": PLAIN},
    "opob-lora": {"pool": "gradient", "lora": LORA, "loss": PLAIN},
    "opob-small": BF16 | {"pool": "gradient", "loss": PLAIN, "tokens_per_microbatch": 128},
    "otb-small": BF16 | {"pool": "energy", "loss": PLAIN, "tokens_per_microbatch": 128},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optim": "muon"},
    "sgd": {"optim": "sgd", "optim_args": {"momentum": 0.9}},
    "adamw": {"optim": "adamw_torch"},
    "amsgrad": {"optim_args": {"amsgrad": True}},
    "large-vocabulary": BF16 | {"vocab": 3000},
} | {
    f"{name}-{kind}": BF16 | {"loss": LossConfig(policy_loss=POLICY_LOSSES[kind](), correction=CORRECTIONS[name]())}
    for name in CORRECTIONS
    if name != "none"
    for kind in ("clip", "plain")
}


def learner_of(
    *,
    lora: Any = None,
    reference: bool = False,
    drawn: Any = None,
    vocab: int = VOCAB,
    half_base: bool = False,
    **options: Any,
) -> LocalLearner:
    model = qwen3(vocab).to("cuda")
    if half_base:
        model = model.bfloat16().float()
    kept = frozen_copy(model) if reference else None
    if lora is not None:
        model = adapted(model, lora, None, None, word_tokenizer(VOCAB), keep_reference=False).model
    if half_base:
        halve_frozen(model)
    return LocalLearner(model, TokenDistribution(vocab, **(drawn or {})), LearnerOptions(**options), kept)


def rank_of_one(device: str) -> Any:
    """The part of a rank that keeps an optimizer's state: one parameter, no process group."""
    rank = object.__new__(ShardedLearner)
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    rank._params, rank.reference = {"w": parameter}, None
    rank.optimizer = torch.optim.AdamW([parameter], fused=True)
    return rank


def step_of(rank: Any) -> None:
    rank._params["w"].grad = torch.ones_like(rank._params["w"])
    rank.optimizer.step()
