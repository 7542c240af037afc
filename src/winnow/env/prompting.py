"""Prompts and observations as token ids, and token ids as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from ..types import Message, Prompt

_MARK = "\u241fwinnow\u241f"


class PromptError(ValueError):
    """A prompt that this model cannot be given; the message names the prompt and the remedy."""


@dataclass(frozen=True, slots=True)
class ToolPrompt(Prompt):
    """Messages for a model that may call tools."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas, for the chat template's `tools`."""


class NextMessages(str):
    """An observation of messages: as text their contents, for the chat template the messages themselves.

    What tools gave, or an agent asks. As first observation they are the prompt, with the `tools` that they offer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]

    def __new__(cls, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> NextMessages:
        text = super().__new__(cls, "\n".join(str(m["content"]) for m in messages))
        text.messages, text.tools = tuple(messages), tuple(tools)
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return NextMessages, (self.messages, self.tools)


def encode_prompt(tokenizer: Any, prompt: Prompt, observation: str | None = None) -> tuple[int, ...]:
    """Token ids of a prompt, with an environment's first observation appended (as a user message, if conversational).

    Text is encoded with the tokenizer's own special tokens; messages with its chat template and generation prompt. With
    tools, the observation goes to the end of the last message, as in TRL. What an agent asks is all of the prompt.

    Raises PromptError when the result is empty, messages meet a tokenizer without chat template or a template that
    refuses them, or tools one that cannot show them, and when the tokenizer knows no token for a part of the text.
    """
    if isinstance(observation, NextMessages):
        asked: type[Prompt] = ToolPrompt if observation.tools else Prompt
        offered: dict[str, Any] = {"tools": observation.tools} if observation.tools else {}
        prompt = asked(prompt.id, prompt.ordinal, messages=observation.messages, **offered)
        observation = None
    if prompt.messages is None:
        ids = _encoded(tokenizer, prompt, (prompt.text or "") + (observation or ""))
    else:
        messages: list[Message] = list(prompt.messages)
        require_chat_template(tokenizer, prompt)
        tools: dict[str, Any] = {}
        if isinstance(prompt, ToolPrompt):
            require_tool_template(tokenizer, prompt)
            tools = {"tools": list(prompt.tools) or None}
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + (observation or "")}
        elif observation is not None:
            messages.append({"role": "user", "content": observation})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools)
        except Exception as error:  # whatever a template may raise, e.g. that it knows no system messages
            raise PromptError(f"prompt '{prompt.id}': the chat template refuses its messages: {error}") from None
        ids = _encoded(tokenizer, prompt, text, add_special_tokens=False)
    if not ids:
        raise PromptError(f"prompt '{prompt.id}' is empty after tokenization")
    return tuple(ids)


def _encoded(tokenizer: Any, prompt: Prompt, text: str, **options: Any) -> Sequence[int]:
    try:
        ids: Sequence[int] = tokenizer.encode(text, **options)
    except Exception as error:  # its own class: a vocabulary without bytes or an unknown token does not have every text
        raise PromptError(f"prompt '{prompt.id}': the tokenizer cannot encode its text: {error}") from None
    return ids


def require_chat_template(tokenizer: Any, prompt: Prompt) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"prompt '{prompt.id}' is a list of messages, but the tokenizer has no chat template; "
            "use a chat model, or give text prompts"
        )


_shows_tools: WeakSet[Any] = WeakSet()


def require_tool_template(tokenizer: Any, prompt: Prompt) -> None:
    """Raises PromptError unless the chat template shows tools, calls of them, and what they return."""
    if tokenizer in _shows_tools:
        return
    parts = ("offer", "name", "key", "value", "result")
    offer, name, key, value, result = marks = [f"winnow_{part}" for part in parts]
    call = {"type": "function", "function": {"name": name, "arguments": {key: value}}}
    schema = {"type": "function", "function": {"name": offer, "description": "", "parameters": {"type": "object"}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": result},
    ]
    shown = error = ""
    try:
        shown = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False)
    except Exception as raised:  # whatever a template may raise
        error = f" ({type(raised).__name__}: {raised})"
    if missing := [part for part, mark in zip(parts, marks, strict=True) if mark not in shown]:
        raise PromptError(
            f"prompt '{prompt.id}' has tools, but the chat template leaves out their {', '.join(missing)}; use a model "
            f"or template made for tool calls{error}"
        )
    _shows_tools.add(tokenizer)


def encode_observation(tokenizer: Any, prompt: Prompt, observation: str, sampled: np.ndarray) -> list[int]:
    """Token ids that carry an observation between two turns; what was sampled is never re-tokenized.

    For messages it is what the chat template puts between an assistant's words and its next generation prompt; an
    end-of-turn token that the model has already sampled is not repeated.
    """
    added: Sequence[Message] = [{"role": "user", "content": observation}]
    if isinstance(observation, NextMessages):
        added = observation.messages
        if added[0]["role"] == "tool":
            return _without_sampled_end(tokenizer, _after_tool_call(tokenizer, added), sampled)
    elif prompt.messages is None:
        return list(tokenizer.encode(observation, add_special_tokens=False))
    before = prompt.messages or [{"role": "user", "content": "?"}]
    turn: list[Message] = [*before, {"role": "assistant", "content": _MARK}, *added]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return _without_sampled_end(tokenizer, text.rpartition(_MARK)[2], sampled)


def _after_tool_call(tokenizer: Any, results: Sequence[Message]) -> str:
    """Text that the chat template puts behind an assistant's tool call, from its end of turn on (as TRL finds it).

    Raises PromptError when the template shows a call otherwise once there are results.
    """
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    before = tokenizer.apply_chat_template(turn, tokenize=False)
    text = str(tokenizer.apply_chat_template([*turn, *results], tokenize=False, add_generation_prompt=True))
    if tokenizer.eos_token in before:
        before = before[: before.rindex(tokenizer.eos_token)]
    if not text.startswith(before):
        raise PromptError(
            "the chat template shows a tool call otherwise once there is a result, so turns cannot be joined; "
            "use a template that keeps what it has shown, such as TRL's training templates"
        )
    return text[len(before) :]


def _without_sampled_end(tokenizer: Any, text: str, sampled: np.ndarray) -> list[int]:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
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
