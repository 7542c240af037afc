"""Build reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"


LONGEST = 40


def write(path: Path, *, labels: int = 1, kind: Any = LlamaForSequenceClassification, template: str | None = TEMPLATE):
    """A random reward model that knows hardly any word, so that `0 1 2 ...` is a token a number."""
    words = ["<unk>", "<eos>", "why?", "user", "assistant", ":", *map(str, range(20))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = template
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        num_labels=labels,
        eos_token_id=1,
        bos_token_id=None,
    )
    kind(config).save_pretrained(path)
    fast.save_pretrained(path)
    return str(path)
