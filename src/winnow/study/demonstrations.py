"""Demonstrations from rows of data: a column with good completions, and a tokenizer for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..base.dotted import nearest
from ..base.errors import ConfigError
from ..types import Prompt

PAD, EOS = "<pad>", "<eos>"
ROLES = ("system", "user", "assistant", "tool")
COLUMNS = ("completion", "solution", "answer", "ground_truth")
"""Columns that may hold the completion to teach; the first one present is used."""
MAX_READ = 100_000
"""Most demonstrations that a tokenizer is made from."""
BYTES = 256

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class RowDemonstrations:
    """Demonstrations of a task's training prompts, each the text in a column of its row; rows without one are left out.

    Raises ConfigError when the column is missing, or a value is no text, number or assistant answer.
    """

    def __init__(self, name: str, prompts: Sequence[Prompt], column: str | None = None) -> None:
        self.name, self._prompts = name, prompts
        self._column = _column(name, list(prompts[0].columns), column)
        self.has_messages = False
        rows = []
        for prompt in prompts:
            self.has_messages |= prompt.messages is not None
            if self._completion(prompt) is not None:
                rows.append(prompt.ordinal)
        if not rows:
            raise ConfigError(f"warm start: {name}: column '{self._column}' is empty in every row")
        self._rows_N = np.array(rows)

    def __len__(self) -> int:
        return len(self._rows_N)

    def demonstrations(self, seed: int) -> Iterator[tuple[Prompt, str]]:
        """Yield endless (prompt, completion) pairs: all in turn, in an order set by `seed` and the turn."""
        for turn in count():
            for row in np.random.default_rng((seed, turn)).permutation(self._rows_N).tolist():
                yield self._pair(row)

    def texts(self) -> Iterator[str]:
        """Yield text for a tokenizer: prompts and completions of the first rows."""
        for row in self._rows_N[:MAX_READ].tolist():
            prompt, completion = self._pair(row)
            said = [prompt.text or ""] if prompt.messages is None else [str(m.get("content")) for m in prompt.messages]
            yield from (*said, completion)

    def _pair(self, row: int) -> tuple[Prompt, str]:
        prompt = self._prompts[row]
        completion = self._completion(prompt)
        assert completion is not None
        return prompt, completion

    def _completion(self, prompt: Prompt) -> str | None:
        value = prompt.columns.get(self._column)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
            value = value[0].get("content")  # TRL's conversational completion
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise ConfigError(
                f"warm start: prompt '{prompt.id}': '{self._column}' must be text, a number, or one message of the "
                f"assistant, found {value!r:.60}"
            )
        text = "" if value is None else str(value)
        return text if text.strip() else None


def _column(name: str, columns: Sequence[str], wanted: str | None) -> str:
    """Return the column with completions. Raises ConfigError."""
    there = ", ".join(sorted(columns)) or "none but the prompt"
    if wanted is None:
        found = next((column for column in COLUMNS if column in columns), None)
        if found is None:
            raise ConfigError(
                f"warm start: {name}: there is nothing to learn from: no column {', '.join(COLUMNS)} (columns: "
                f"{there}); name the one with good completions: completion_column=..."
            )
        return found
    if wanted not in columns:
        raise ConfigError(
            f"warm start: completion_column: no column '{wanted}' (columns: {there}).{nearest(wanted, columns)}"
        )
    return wanted


def byte_tokenizer(demonstrations: RowDemonstrations, vocab_size: int, max_positions: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE made from demonstrations: unseen text costs more tokens, but nothing is unknown.

    Digits are separate tokens. With messages it has a chat template. Raises ValueError when `vocab_size` has no room
    for the bytes.
    """
    special = [PAD, EOS, *(f"<|{role}|>" for role in ROLES if demonstrations.has_messages)]
    if vocab_size < BYTES + len(special):
        raise ValueError(f"warm start: vocab_size must be at least {BYTES + len(special)}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(demonstrations.texts(), trainer)
    made = plain_tokenizer(tokenizer, max_positions, additional_special_tokens=special[2:])
    if demonstrations.has_messages:
        made.chat_template = TEMPLATE
    return made


def plain_tokenizer(tokenizer: Tokenizer, max_positions: int, **options: Any) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers: left padding, plain decoding."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        **options,
    )
