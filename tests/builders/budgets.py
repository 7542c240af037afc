"""Models, rows and configurations whose memory is predicted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from winnow.config import RunConfig, validate
from winnow.learner.rows import Row
from winnow.types import Rollout

RECIPES = Path(__file__).parents[2] / "recipes"


VOCAB = 512


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


QWEN3 = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}


REAL: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def qwen3(**changes: Any) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{"num_hidden_layers": 3} | changes, **SIZES, **QWEN3, head_dim=128)).eval()


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **QWEN3, num_hidden_layers=3)).eval()


def config(**changes: Any) -> RunConfig:
    values = {"model": "m", "env": "countdown", "dtype": "float32", "max_prompt_length": 64, "num_generations": 4}
    values |= {"engine": "local"}
    return validate(values | {"max_completion_length": 64, "prompts_per_step": 4} | changes)


def rows_of(tokens: int, prompt_tokens: int = 8, siblings: int = 1) -> list[Row]:
    """Rows of 128 tokens, prompts among them; so many siblings share one."""
    draws, rows, sampled = random.Random(0), [], 128 - prompt_tokens
    for number in range(tokens // 128):
        ids = np.array([draws.randrange(2, VOCAB) for _ in range(sampled)])
        zeros = np.zeros(sampled)
        first = 5 + number // siblings
        prompt = tuple(range(first, first + prompt_tokens))
        rollout = Rollout(number, prompt, ids, zeros == 0, zeros.astype(np.float32) - 5, zeros.astype(np.int32))
        rows.append(Row(rollout, 1.0, 0.01))
    return rows


BFLOAT16 = {"name": "local", "slots": 4, "dtype": "bfloat16"}


def total(held: Any) -> int:
    return sum(held.values())


UPDATES = [  # the slow ones differ from others in one setting
    (qwen3, {}, True),
    (qwen3, {}, False),
    (llama, {}, False),
    pytest.param(qwen3, {"dtype": "bfloat16"}, True, marks=pytest.mark.slow),
    pytest.param(qwen3, {"dtype": "bfloat16"}, False, marks=pytest.mark.slow),
    (llama, {"dtype": "bfloat16"}, True),
    (qwen3, {"dtype": "bfloat16", "gradient_checkpointing": True}, False),
    pytest.param(qwen3, {"dtype": "bfloat16", "lora": {"r": 8}}, True, marks=pytest.mark.slow),
    pytest.param(
        lambda: qwen3().bfloat16().float(), {"dtype": "bfloat16", "lora": {"r": 8}}, True, marks=pytest.mark.slow
    ),
]


def shell(tmp_path: Path, name: str) -> str:
    sizes = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960, "vocab_size": 151_936}
    tied = name in ("0.6B", "1.7B", "4B")
    Qwen3Config(**REAL[name], **sizes, tie_word_embeddings=tied, dtype="bfloat16").save_pretrained(tmp_path / name)
    path = tmp_path / name / "config.json"
    path.write_text(path.read_text().replace('"model_type"', '"architectures": ["Qwen3ForCausalLM"], "model_type"'))
    return str(tmp_path / name)
