"""Warm start: train a new or a pretrained model on demonstrations until it solves some prompts.

The result is an ordinary Hugging Face directory, which `from_pretrained` loads. A new model is a small Llama with a
tokenizer of its task: one token per word if the task knows all words, else byte-level BPE for rows of data. (For a
Qwen2 model `AutoTokenizer` would insist on Qwen2's own byte-level tokenizer.) The loss is the mean cross-entropy of
completion tokens and end of sequence; prompts carry none.
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

from ..base.errors import ConfigError
from ..base.files import readable
from ..base.machine import usable_threads
from ..base.weights import state_once
from ..config.options import template_text
from ..engine.facts import end_where_rollouts_do
from ..engine.initial_model import require_embeddings
from ..engine.loading import load_causal_lm, load_tokenizer, resolve_device
from ..engine.saving import save_whole, types_of
from ..engine.template import with_template
from ..env.base import Demonstrator, Task
from ..env.chat import end_of_turn
from ..env.prompting import as_beginning, encode_prompt
from ..learner.local.forward import head_is_linear
from ..run.resolve import threads_for
from ..types import Prompt
from .demonstrations import EOS, PAD, RowDemonstrations, byte_tokenizer, plain_tokenizer

IGNORED = -100
MAX_GRAD_NORM, FINAL_LR_SHARE = 1.0, 0.05
PART_TOKENS = 1024
"""Tokens per forward pass of a pretrained model; the gradient is that of the whole batch."""
NEW_MODEL = (
    *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("max_positions", "vocab_size"),
)
"""Options that shape a model made from scratch."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Size of the model and length of its training. The defaults suit Countdown on two CPU cores."""

    model: str | None = None
    """Directory or hub name of a pretrained model to teach; None: make a new one."""
    completion_column: str | None = None
    """Column of the data with the completions to teach; None: the first present of completion, solution, answer,
    ground_truth. No effect on tasks that show solutions themselves."""
    chat_template: str | None = None
    """Text of a chat template, or a file with it, for the saved model; None: its own."""
    max_steps: int = 330
    batch_size: int = 128
    learning_rate: float | None = None
    """None: 3e-3 for a new model, 2e-5 for a pretrained one."""
    warmup_steps: int = 30
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 1
    max_positions: int = 512
    vocab_size: int = 2048
    """Most tokens of a tokenizer made from rows of data."""
    seed: int = 0
    threads: int | Literal["auto"] | None = "auto"
    """CPU threads for training; `auto` as in a run, None leaves torch's setting."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"warm start: {name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"warm start: num_heads={self.num_heads} must divide hidden_size={self.hidden_size} and be a multiple "
                f"of num_kv_heads={self.num_kv_heads}"
            )
        if self.rate <= 0:
            raise ValueError(f"warm start: learning_rate must be positive, got {self.learning_rate}")
        changed = [name for name in NEW_MODEL if getattr(self, name) != getattr(WarmStartConfig, name)]
        if self.model is not None and changed:
            raise ValueError(f"warm start: {changed[0]} shapes a new model and has no effect with model; remove it")

    @property
    def rate(self) -> float:
        """Peak learning rate."""
        return self.learning_rate if self.learning_rate is not None else 3e-3 if self.model is None else 2e-5


Shown = Demonstrator | RowDemonstrations


def warm_start(
    task: Demonstrator | Task, output_dir: str | Path, *, config: WarmStartConfig | None = None
) -> dict[str, Any]:
    """Teach a model from `task.demonstrations`, or else from a column of the task's rows, and save it in `output_dir`.

    Deterministic for a seed and a thread count. Returns `{output_dir, parameters, vocab_size, steps, loss, seconds}`,
    with the mean loss (nats per token) of the last 20 steps, and for rows the number of `demonstrations`. Raises
    TypeError if the task has neither, ConfigError for rows or a model that cannot be used, FileExistsError if the
    directory is not empty, FloatingPointError if the loss is not finite.
    """
    config = config or WarmStartConfig()
    shown = _shown(task, config)
    try:
        template = None if config.chat_template is None else template_text(config.chat_template)
    except ValueError as error:
        raise ConfigError(f"warm start: chat_template: {error}") from None
    output = Path(output_dir)
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"warm start: {output} is not empty; choose another directory or remove it")
    start = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model, tokenizer = _pretrained(config.model) if config.model is not None else _new(shown, config)
        tokenizer = with_template(tokenizer, template, {})
        end_where_rollouts_do(model, tokenizer)
        loss = _teach(model, tokenizer, shown, config)
    output.mkdir(parents=True, exist_ok=True)
    save_whole(model, output, state_once(model), {} if config.model is None else types_of(config.model))
    tokenizer.save_pretrained(output)
    readable(output)
    found = {
        "output_dir": str(output),
        "parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "steps": config.max_steps,
        "loss": loss,
        "seconds": time.monotonic() - start,
    }
    return found | ({"demonstrations": len(shown)} if isinstance(shown, RowDemonstrations) else {})


def _shown(task: Any, config: WarmStartConfig) -> Shown:
    """Return the task itself, if it shows solutions, or its rows."""
    if isinstance(task, Demonstrator):
        if config.completion_column is not None:
            raise ValueError(f"warm start: completion_column has no effect: {task.name} shows solutions itself")  # type: ignore[attr-defined]
        return task
    if not getattr(task, "train", None):
        raise TypeError(f"warm start: task {getattr(task, 'name', task)!r} has no demonstrations to teach from")
    for column, where in getattr(task, "unshown_columns", {}).items():
        raise ConfigError(
            f"warm start: {where}: the model would not be given column '{column}', which is usually part of the "
            "prompt; write it into the messages, use preset: alpaca or sharegpt, or remove the column"
        )
    return RowDemonstrations(task.name, task.train, config.completion_column)


def _new(shown: Shown, config: WarmStartConfig) -> tuple[Any, PreTrainedTokenizerFast]:
    if isinstance(shown, RowDemonstrations):
        tokenizer = byte_tokenizer(shown, config.vocab_size, config.max_positions)
    else:
        tokenizer = word_tokenizer(shown.vocabulary(), config.max_positions)
    return small_model(tokenizer, config), tokenizer


def _pretrained(source: str) -> tuple[Any, Any]:
    tokenizer = load_tokenizer(source)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"warm start: the tokenizer of '{source}' has no end of sequence, which completions end with")
    model = load_causal_lm(source, resolve_device("auto"))
    require_embeddings(model, tokenizer, source)
    return model, tokenizer


def word_tokenizer(words: Sequence[str], max_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, separated by blanks; it adds nothing and refuses unknown words."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([PAD, EOS, *words]))}
    split = [word for word in vocabulary if not word or len(word.split()) != 1]
    if split:
        raise ValueError(f"warm start: words of a vocabulary must not be empty or contain blanks: {split[:5]!r}")
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return plain_tokenizer(tokenizer, max_positions)


def small_model(tokenizer: PreTrainedTokenizerFast, config: WarmStartConfig) -> LlamaForCausalLM:
    """Return an untrained Llama with tied embeddings and the tokenizer's vocabulary."""
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
    # With bfloat16 multiplication, fused attention is several times slower than eager on short sequences.
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def _teach(model: Any, tokenizer: Any, shown: Shown, config: WarmStartConfig) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_share(step, config))
    batches = _batches(shown, tokenizer, config, longest=model.config.max_position_embeddings)
    linear = head_is_linear(model, len(tokenizer))
    losses: list[float] = []
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("medium")  # lets a CPU with AMX multiply in bfloat16; weights stay float32
    torch.set_num_threads(_threads(model, config) or threads)
    model.train()
    try:
        with Progress(transient=True) as progress:
            bar = progress.add_task("warm start", total=config.max_steps)
            for step, batch in enumerate(islice(batches, config.max_steps)):
                loss = _backward(model, batch, linear=linear)
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
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
    return threads_for(sum(p.numel() for p in model.parameters()), usable_threads())


def _lr_share(step: int, config: WarmStartConfig) -> float:
    """Return a linear rise over `warmup_steps`, then a linear decay to `FINAL_LR_SHARE` at the last step."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return 1.0 - (1.0 - FINAL_LR_SHARE) * min(1.0, progress)


Rows = tuple[torch.Tensor, torch.Tensor]
"""int64 ids [B,T] and labels [B,T], padded on the right; labels outside the taught tokens are `IGNORED`."""


def _batches(shown: Shown, tokenizer: Any, config: WarmStartConfig, longest: int | None = None) -> Iterator[list[Rows]]:
    """Yield endless batches in parts: of similar lengths where lengths differ much, small for a large model."""
    demonstrations: Iterator[tuple[Any, Any]] = iter(shown.demonstrations(config.seed))
    limit = longest or config.max_positions
    while True:
        pairs = [(p, [c] if isinstance(c, str) else c) for p, c in islice(demonstrations, config.batch_size)]
        texts = [text for _, parts in pairs for text in parts]
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        prompts = _prompt_ids(tokenizer, [prompt for prompt, _ in pairs])
        rows = []
        for ids, (prompt, parts) in zip(prompts, pairs, strict=True):
            in_chat = isinstance(prompt, Prompt) and prompt.messages is not None
            end = end_of_turn(tokenizer) if in_chat else tokenizer.eos_token_id
            rows.append(_row([ids, *islice(encoded, len(parts))], end))
        if (most := max(len(ids) for ids, _ in rows)) > limit:
            option = "max_positions" if config.model is None else "the model's max_position_embeddings"
            raise ValueError(f"warm start: a demonstration of {most} tokens exceeds {option}={limit}")
        parts_of = _parts(rows, None if config.model is None else PART_TOKENS)
        yield [_padded(part, tokenizer.pad_token_id or 0) for part in parts_of]


def _prompt_ids(tokenizer: Any, prompts: Sequence[str | Prompt]) -> list[list[int]]:
    """Return prompt ids, encoded as in a rollout."""
    if all(isinstance(prompt, str) for prompt in prompts):
        full = tokenizer(list(prompts))["input_ids"]
        bare = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        return [as_beginning(tokenizer, *each) for each in zip(full, bare, strict=True)]
    return [list(encode_prompt(tokenizer, prompt)) for prompt in prompts if isinstance(prompt, Prompt)]


def _parts(
    rows: list[tuple[list[int], list[int]]], tokens: int | None = None
) -> list[list[tuple[list[int], list[int]]]]:
    """Return the rows, or parts of rows with similar lengths, each of at most `tokens` tokens."""
    parts: list[list[tuple[list[int], list[int]]]] = []
    for row in sorted(rows, key=lambda r: len(r[0])):
        fits = tokens is None or not parts or (len(parts[-1]) + 1) * len(row[0]) <= tokens
        if parts and fits and len(row[0]) <= 2 * len(parts[-1][0][0]) + 16:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts if len(parts) > 1 else [rows]


def _padded(rows: list[tuple[list[int], list[int]]], pad: int) -> Rows:
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    return ids_BT, torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows])


def _backward(model: Any, batch: list[Rows], *, linear: bool = True) -> float:
    """Add the gradient of the mean over all labels of the batch; return that mean."""
    labels = [int((labels_BT[:, 1:] != IGNORED).sum()) for _, labels_BT in batch]
    mean = 0.0
    for (ids_BT, labels_BT), n in zip(batch, labels, strict=True):
        loss = _loss(model, ids_BT.to(model.device), labels_BT.to(model.device), linear=linear) * (n / sum(labels))
        loss.backward()
        mean += loss.item()
    return mean


def _row(encoded: list[list[int]], eos: int) -> tuple[list[int], list[int]]:
    """Return ids and labels of one demonstration: prompt, action, observation, action, ..., action.

    As in a rollout, an end of sequence or of the template's turn follows every action. Raises ValueError if it does not
    end with an action.
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


def _loss(model: Any, ids_BT: torch.Tensor, labels_BT: torch.Tensor, *, linear: bool = True) -> torch.Tensor:
    """Return the mean cross-entropy over labelled tokens; right padding needs no mask.

    Only their logits are computed, where these are `linear` in the hidden states.
    """
    targets_BT = labels_BT[:, 1:]
    labelled_BT = targets_BT != IGNORED
    if linear:
        hidden_BTD = model.get_decoder()(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
        logits_NV = model.get_output_embeddings()(hidden_BTD[labelled_BT])
    else:
        logits_NV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits[labelled_BT]
    return cross_entropy(logits_NV, targets_BT[labelled_BT])
