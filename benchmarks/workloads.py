"""What the whole-step benchmark runs on: a model, its prompts, and the shape of a step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from winnow.study.warm_start import WarmStartConfig, warm_start, word_tokenizer
from winnow.tasks.countdown import CountdownConfig

NEVER = "<jupyter_script>"
"""A token of SmolLM2's vocabulary that comes up in no chat."""


@dataclass(frozen=True)
class Workload:
    name: str
    model_dir: Path
    prompts: Sequence[str]
    prompts_per_step: int
    max_completion_length: int
    learning_rate: float
    num_generations: int = 8
    zero_variance_share: float | None = None
    """Groups with equal rewards, exactly; None: as it comes."""

    @property
    def rollouts(self) -> int:
        return self.prompts_per_step * self.num_generations


def short_workload(directory: Path, *, teaching_steps: int, prompts_per_step: int) -> Workload:
    """The demo's: Countdown, a 0.7M-parameter model after a short warm start, about a dozen tokens each."""
    task = CountdownConfig().build()
    warm_start(task, directory / "short", config=WarmStartConfig(max_steps=teaching_steps))
    texts = [str(p.text) for p in task.train]
    return Workload("short", directory / "short", texts, prompts_per_step, 24, 1e-4)


SHORT_WORDS, LONG_WORDS, PROMPT_WORDS = 60, 60, 20
SHORT_SHARE, SHORT_MEAN, LONG_MEAN = 0.72, 22.0, 350.0
"""A mixture of two geometric lengths: cut at 256, its median is 24 and its mean 66."""


def long_tail_workload(directory: Path, *, prompts_per_step: int) -> Workload:
    """Completions of 24 tokens in the median and 256 at most."""
    path = directory / "long_tail"
    prompt_words = [f"p{i}" for i in range(PROMPT_WORDS)]
    content = [f"{kind}{i}" for kind, n in (("s", SHORT_WORDS), ("l", LONG_WORDS)) for i in range(n)]
    tokenizer = word_tokenizer([*prompt_words, *content], max_positions=512)
    model = long_tail_model(tokenizer, len(prompt_words))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(prompt_words, size=10)) for _ in range(1024)]
    return Workload("long_tail", path, texts, prompts_per_step, 256, 1e-6)


@torch.no_grad()
def long_tail_model(tokenizer: Any, n_prompt_words: int) -> LlamaForCausalLM:
    """A Llama whose next token depends on the kind of the current one: prompt word, short word or long word.

    The layers compute in full and add next to nothing; three directions of the embeddings carry the kind to the head.
    """
    torch.manual_seed(0)
    hidden, vocabulary = 128, len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(1e-2)
        layer.mlp.down_proj.weight.mul_(1e-2)
    first = vocabulary - SHORT_WORDS - LONG_WORDS
    kind_V = torch.full((vocabulary,), 2)
    kind_V[first : first + SHORT_WORDS], kind_V[first + SHORT_WORDS :] = 0, 1
    embeddings = torch.randn(vocabulary, hidden)
    embeddings[:, :3] = 0
    embeddings *= (hidden - 3) ** 0.5 / embeddings.norm(dim=1, keepdim=True)
    embeddings[torch.arange(vocabulary), kind_V] = 3**0.5
    model.get_input_embeddings().weight.copy_(embeddings)

    logits_3V = torch.full((3, vocabulary), -30.0)
    for kind, (words, mean) in enumerate(((SHORT_WORDS, SHORT_MEAN), (LONG_WORDS, LONG_MEAN))):
        logits_3V[kind, kind_V == kind] = 0
        logits_3V[kind, tokenizer.eos_token_id] = float(np.log(words / (mean - 1)))
        logits_3V[2, kind_V == kind] = float(np.log((SHORT_SHARE if kind == 0 else 1 - SHORT_SHARE) / words))
    head = torch.zeros(vocabulary, hidden)
    head[:, :3] = logits_3V.t() / 3**0.5
    model.lm_head.weight.copy_(head)
    return model


def chat_workload(directory: Path, model: Path, *, long_tail: bool, prompts_per_step: int) -> Workload:
    """A pretrained chat model and questions, rendered with its chat template.

    Its completions end where it ends them; but unless `long_tail`, a token that it never samples stands for the end of
    a text, so that all are of one length and no side is told.
    """
    name = "long_tail" if long_tail else "equal"
    path, rng = directory / name, np.random.default_rng(0)
    shutil.copytree(model, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    questions = [f"What is {a} times {b}?" for a, b in rng.integers(11, 99, (256, 2))]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        for q in questions
    ]
    if not long_tail:
        tokenizer.eos_token, tokenizer.chat_template = NEVER, None  # a turn's end, too, would end a text
        tokenizer.save_pretrained(path)
        path.joinpath("chat_template.jinja").unlink(missing_ok=True)
        for file in (path / "config.json", path / "generation_config.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokenizer.eos_token_id}))
    return Workload(name, path, texts, prompts_per_step, 256 if long_tail else 64, 1e-6, 8, 0 if long_tail else 1 / 4)
