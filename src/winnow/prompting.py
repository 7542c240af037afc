"""Prompts and observations as token ids, and token ids as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from .types import Message, Prompt

_MARK = "\u241fwinnow\u241f"


class PromptError(ValueError):
    """A prompt that this model cannot be given; the message names the prompt and the remedy."""


def encode_prompt(tokenizer: Any, prompt: Prompt, observation: str | None = None) -> tuple[int, ...]:
    """Token ids of a prompt, with an environment's first observation appended (as a user message, if conversational).

    Text is encoded with the tokenizer's own special tokens; messages with its chat template and generation prompt.
    Raises PromptError when the result is empty or messages meet a tokenizer without chat template.
    """
    if prompt.messages is None:
        ids = tokenizer.encode((prompt.text or "") + (observation or ""))
    else:
        messages: list[Message] = list(prompt.messages)
        if observation is not None:
            messages.append({"role": "user", "content": observation})
        require_chat_template(tokenizer, prompt)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise PromptError(f"prompt '{prompt.id}' is empty after tokenization")
    return tuple(ids)


def require_chat_template(tokenizer: Any, prompt: Prompt) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"prompt '{prompt.id}' is a list of messages, but the tokenizer has no chat template; "
            "use a chat model, or give text prompts"
        )


def encode_observation(tokenizer: Any, prompt: Prompt, observation: str, sampled: np.ndarray) -> list[int]:
    """Token ids that carry an observation between two turns; what was sampled is never re-tokenized.

    For messages it is what the chat template puts between an assistant's words and its next generation prompt; an
    end-of-turn token that the model has already sampled is not repeated.
    """
    if prompt.messages is None:
        return list(tokenizer.encode(observation, add_special_tokens=False))
    turn: list[Message] = [*prompt.messages, {"role": "assistant", "content": _MARK}]
    turn.append({"role": "user", "content": observation})
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer.encode(text.rpartition(_MARK)[2], add_special_tokens=False))
    if ids and len(sampled) and ids[0] == int(sampled[-1]):
        return ids[1:]
    return ids


def decode(tokenizer: Any, sequences: Sequence[np.ndarray]) -> list[str]:
    """Text of several sequences, special tokens removed, at the speed of the tokenizer's own batch decoder."""
    plain = [[int(t) for t in ids] for ids in sequences]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return list(backend.decode_batch(plain, skip_special_tokens=True))
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain]


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over vocabulary and chat template."""
    content = json.dumps(tokenizer.get_vocab(), sort_keys=True) + str(tokenizer.chat_template)
    return hashlib.sha256(content.encode()).hexdigest()


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the earliest stop string."""
    ends = [text.index(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text
