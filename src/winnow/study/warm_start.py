"""Warm start: a small model from scratch, taught from a task's demonstrations until it solves some prompts.

The result is an ordinary Hugging Face directory: a Llama model and a word-level tokenizer (one token a word), which
`from_pretrained` loads. (For a Qwen2 model `AutoTokenizer` would insist on Qwen2's own byte-level tokenizer.) The loss
is the mean cross-entropy of completion tokens and end of sequence; prompts carry none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..base.files import readable
from ..base.processor import usable_threads
from ..env.base import Demonstrator
from ..run.machine import choose_threads
from ..run.speed import Matrices

PAD, EOS = "<pad>", "<eos>"
IGNORED = -100


@dataclass(frozen=True)
class WarmStartConfig:
    """Size of the model and how long it is taught. The defaults suit Countdown on two CPU cores."""

    max_steps: int = 330
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    final_lr_share: float = 0.05
    """The learning rate decays linearly to this share of its peak."""
    max_grad_norm: float = 1.0
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 1
    max_positions: int = 512
    seed: int = 0
    threads: int | Literal["auto"] | None = "auto"
    """CPU threads while teaching; `auto` measures, None leaves torch's setting."""
    matmul_precision: Literal["highest", "high", "medium"] = "medium"
    """`medium` lets the CPU multiply in bfloat16 where it has AMX; weights stay float32."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"warm start: {name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"warm start: num_heads={self.num_heads} must divide hidden_size={self.hidden_size} and be a multiple "
                f"of num_kv_heads={self.num_kv_heads}"
            )
        if self.learning_rate <= 0:
            raise ValueError(f"warm start: learning_rate must be positive, got {self.learning_rate}")


def warm_start(task: Demonstrator, output_dir: str | Path, *, config: WarmStartConfig | None = None) -> dict[str, Any]:
    """Teach a new model from `task.demonstrations` and save it in `output_dir`.

    Deterministic for a seed and a thread count. Returns `{output_dir, parameters, vocab_size, steps, loss, seconds}`,
    with the mean loss (nats a token) of the last 20 steps. Raises TypeError if the task has no demonstrations,
    FileExistsError if the directory holds anything, FloatingPointError if the loss is not finite.
    """
    config = config or WarmStartConfig()
    if not isinstance(task, Demonstrator):
        raise TypeError(f"warm start: task {getattr(task, 'name', task)!r} has no demonstrations to teach from")
    output = Path(output_dir)
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"warm start: {output} is not empty; choose another directory or remove it")
    start = time.monotonic()
    tokenizer = word_tokenizer(task.vocabulary(), config.max_positions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = small_model(tokenizer, config)
        loss = _teach(model, tokenizer, task, config)
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    readable(output)
    return {
        "output_dir": str(output),
        "parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "steps": config.max_steps,
        "loss": loss,
        "seconds": time.monotonic() - start,
    }


def word_tokenizer(words: Sequence[str], max_positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a word, words separated by blanks; it adds nothing and refuses unknown words."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([PAD, EOS, *words]))}
    split = [word for word in vocabulary if not word or len(word.split()) != 1]
    if split:
        raise ValueError(f"warm start: words of a vocabulary must not be empty or contain blanks: {split[:5]!r}")
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def small_model(tokenizer: PreTrainedTokenizerFast, config: WarmStartConfig) -> LlamaForCausalLM:
    """An untrained Llama with tied embeddings whose vocabulary is the tokenizer's."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
    )
    # With bfloat16 multiplication the fused attention is several times slower than the plain one on short sequences.
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def _teach(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Demonstrator, config: WarmStartConfig
) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_share(step, config))
    batches = _batches(task, tokenizer, config)
    losses: list[float] = []
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision(config.matmul_precision)
    torch.set_num_threads(_threads(model, config) or threads)
    model.train()
    try:
        with Progress(transient=True) as progress:
            bar = progress.add_task("warm start", total=config.max_steps)
            for step, batch in enumerate(islice(batches, config.max_steps)):
                loss = _backward(model, batch)
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                losses.append(loss)
                if not losses[-1] < float("inf"):
                    raise FloatingPointError(f"warm start: loss is {losses[-1]} at step {step}; lower learning_rate")
                progress.update(bar, advance=1, description=f"warm start, loss {losses[-1]:.3f}")
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    model.eval()
    return sum(losses[-20:]) / len(losses[-20:])


def _threads(model: torch.nn.Module, config: WarmStartConfig) -> int | None:
    if config.threads != "auto":
        return config.threads
    return choose_threads(Matrices.of(model), config.batch_size, torch.float32, usable_threads())[0]


def _lr_share(step: int, config: WarmStartConfig) -> float:
    """Linear rise over `warmup_steps`, then linear decay to `final_lr_share` at the last step."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return 1.0 - (1.0 - config.final_lr_share) * min(1.0, progress)


Rows = tuple[torch.Tensor, torch.Tensor]
"""int64 ids [B,T] and labels [B,T], padded on the right; labels are `IGNORED` off what is taught."""


def _batches(task: Demonstrator, tokenizer: PreTrainedTokenizerFast, config: WarmStartConfig) -> Iterator[list[Rows]]:
    """Endless batches, each cut into parts of similar lengths where lengths differ much."""
    demonstrations = iter(task.demonstrations(config.seed))
    while True:
        pairs = [(p, [c] if isinstance(c, str) else c) for p, c in islice(demonstrations, config.batch_size)]
        encoded = iter(tokenizer([text for prompt, parts in pairs for text in (prompt, *parts)])["input_ids"])
        rows = [_row(list(islice(encoded, 1 + len(parts))), tokenizer.eos_token_id) for _, parts in pairs]
        longest = max(len(ids) for ids, _ in rows)
        if longest > config.max_positions:
            raise ValueError(
                f"warm start: a demonstration of {longest} tokens exceeds max_positions={config.max_positions}"
            )
        yield [_padded(part, tokenizer.pad_token_id) for part in _parts(rows)]


def _parts(rows: list[tuple[list[int], list[int]]]) -> list[list[tuple[list[int], list[int]]]]:
    """The rows themselves, or parts in which no row is much longer than another."""
    parts: list[list[tuple[list[int], list[int]]]] = []
    for row in sorted(rows, key=lambda r: len(r[0])):
        if parts and len(row[0]) <= 2 * len(parts[-1][0][0]) + 16:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts if len(parts) > 1 else [rows]


def _padded(rows: list[tuple[list[int], list[int]]], pad: int) -> Rows:
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    return ids_BT, torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows])


def _backward(model: LlamaForCausalLM, batch: list[Rows]) -> float:
    """Gradient of the mean over all labels of the batch; returns that mean."""
    labels = [int((labels_BT[:, 1:] != IGNORED).sum()) for _, labels_BT in batch]
    mean = 0.0
    for (ids_BT, labels_BT), n in zip(batch, labels, strict=True):
        loss = _loss(model, ids_BT, labels_BT) * (n / sum(labels))
        loss.backward()
        mean += loss.item()
    return mean


def _row(encoded: list[list[int]], eos: int) -> tuple[list[int], list[int]]:
    """Ids and labels of one demonstration: prompt, action, observation, action, ..., action.

    As in a rollout, an end of sequence stands behind every action. Raises ValueError if it does not end with an action.
    """
    if len(encoded) % 2:
        raise ValueError(
            "warm start: a demonstration of many turns is a list that alternates actions and observations and ends "
            f"with an action, so its length is odd; got one of {len(encoded) - 1}"
        )
    ids, labels = list(encoded[0]), [IGNORED] * len(encoded[0])
    for i, part in enumerate(encoded[1:]):
        action = i % 2 == 0
        ids += [*part, eos] if action else part
        labels += [*part, eos] if action else [IGNORED] * len(part)
    return ids, labels


def _loss(model: LlamaForCausalLM, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over labelled tokens. Only their logits are computed; right padding needs no mask."""
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    targets_BT = labels_BT[:, 1:]
    labelled_BT = targets_BT != IGNORED
    return cross_entropy(model.lm_head(hidden_BTD[labelled_BT]), targets_BT[labelled_BT])
