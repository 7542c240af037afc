"""Prompts and observations as token ids, and token ids as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import numpy as np

from ..types import Message, Prompt
from .chat import PromptError as PromptError
from .chat import is_begun, joined, rendered, template_variables, with_text
from .prompt_columns import TOOLS, VALUES, tool_names

_QUESTION: Message = {"role": "user", "content": "?"}
ONE_BY_ONE = 2048
"""Tokens up to which sequences are decoded one by one: the batch decoder starts threads, which takes longer."""


@dataclass(frozen=True)
class TurnSettings:
    """What a request decides about its answer."""

    key: int | None = None
    """64 bits that identify an agent's request in its rollout, whenever it arrives; None: its turn does."""
    max_tokens: int | None = None
    """Most tokens of the answer, if a request limits it."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, in addition to the run's."""


ANY_TURN = TurnSettings()


class NextMessages(str):
    """An observation of messages: their contents as text, and the messages for the chat template.

    Results of tools, or requests of an agent. As first observation they are the prompt, with the `tools` they offer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    continues: int | None
    """Segment of the rollout to whose history they are added, -1 the last; None: they are a whole prompt."""
    whole: tuple[Message, ...]
    """All messages of an agent's request, those before included; empty if unknown."""
    agent: str
    """Agent that asks, in a rollout of several."""
    settings: TurnSettings

    def __new__(
        cls,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        continues: int | None = -1,
        whole: Sequence[Message] = (),
        agent: str = "",
        settings: TurnSettings = ANY_TURN,
    ) -> NextMessages:
        text = super().__new__(cls, "\n".join(str(m["content"]) for m in messages))
        text.messages, text.tools = tuple(messages), tuple(tools)
        text.continues, text.whole, text.agent, text.settings = continues, tuple(whole), agent, settings
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return NextMessages, (self.messages, self.tools, self.continues, self.whole, self.agent, self.settings)


def encode_prompt(tokenizer: Any, prompt: Prompt, observation: str | None = None) -> tuple[int, ...]:
    """Return token ids of a prompt with the first observation appended (as a user message, if conversational).

    Text is encoded with the tokenizer's leading special tokens, unless it begins with them. Messages use the chat
    template and its generation prompt; a final assistant's turn is continued instead. With tools, the observation is
    appended to the last message, as in TRL. An agent's request is the whole prompt.

    Raises PromptError for an empty result, messages without a chat template, or a template that refuses them or cannot
    show tools. Also raised if the tokenizer has no token for a part of the text.
    """
    if isinstance(observation, NextMessages):
        prompt = with_messages(prompt, observation.messages, observation.tools)
        observation = None
    if prompt.messages is None:
        ids = _encoded(tokenizer, prompt, (prompt.text or "") + (observation or ""))
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                f"prompt '{prompt.id}' is a list of messages, but the tokenizer has no chat template; "
                "use a chat model, set chat_template, or give text prompts"
            )
        values = _template_values(tokenizer, prompt)
        if prompt.tools:
            require_tool_template(tokenizer, prompt)
            values[TOOLS] = list(prompt.tools)
        messages = first_messages(prompt, observation)
        try:
            text = rendered(tokenizer, messages, **values)
        except Exception as error:  # any error of a template, e.g. that it has no system messages
            raise PromptError(f"prompt '{prompt.id}': the chat template refuses its messages: {error}") from None
        if hidden := [name for name in tool_names(values.get(TOOLS, ())) if name not in text]:
            raise PromptError(
                f"prompt '{prompt.id}': tools: the chat template leaves out {hidden[0]}; use a model or chat_template "
                "made for tool calls, or remove the column"
            )
        ids = _encoded(tokenizer, prompt, text, whole=True)
    if not ids:
        raise PromptError(f"prompt '{prompt.id}' is empty after tokenization")
    return tuple(ids)


def with_messages(prompt: Prompt, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
    """Return a prompt of these messages, with the id of `prompt` and what its row gives to the chat template."""
    return replace(prompt, text=None, messages=tuple(messages), columns={}, tools=tuple(tools))


def _template_values(tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Return the row's values for the chat template. Raises PromptError naming one that the template does not use."""
    values = dict(prompt.template_values)
    variables = template_variables(tokenizer) if values else None
    for name in values:
        if variables is not None and name not in variables:
            column = TOOLS if name == TOOLS else f"{VALUES}: '{name}'"
            raise PromptError(
                f"prompt '{prompt.id}': {column}: the chat template does not use it; remove it from the data, or set "
                "chat_template to one that does"
            )
    return values


def first_messages(prompt: Prompt, observation: str | None) -> list[Message]:
    """Return the messages with the first observation, inserted before an assistant's turn begun by them."""
    messages: list[Message] = list(prompt.messages or ())
    begun = [messages.pop()] if len(messages) > 1 and is_begun(messages) else []
    if observation is not None and prompt.tools:
        messages[-1] = with_text(messages[-1], observation)
    elif observation is not None:
        messages.append({"role": "user", "content": observation})
    return messages + begun


def _encoded(tokenizer: Any, prompt: Prompt, text: str, *, whole: bool = False) -> Sequence[int]:
    """Encode text; `whole`: it already has its special tokens, as a chat template writes them."""
    try:
        bare: list[int] = tokenizer.encode(text, add_special_tokens=False)
        alone = whole or (bare and not tokenizer.num_special_tokens_to_add())
        return bare if alone else as_beginning(tokenizer, tokenizer.encode(text), bare)
    except Exception as error:  # tokenizers' own: a vocabulary without bytes or unknown token cannot encode every text
        raise PromptError(f"prompt '{prompt.id}': the tokenizer cannot encode its text: {error}") from None


def as_beginning(tokenizer: Any, full: list[int], bare: list[int]) -> list[int]:
    """Return ids of a text to be continued: the tokenizer's leading special tokens once, and no trailing ones.

    `full`, `bare`: the text encoded with and without the tokenizer's special tokens.
    """
    if not bare:
        return [i for i in full if i != tokenizer.eos_token_id or i == tokenizer.bos_token_id]
    for n in range(len(full) - len(bare) + 1):
        if full[n : n + len(bare)] == bare:
            return bare if bare[:n] == full[:n] else full[: n + len(bare)]
    return full


_shows_tools: WeakSet[Any] = WeakSet()


def require_tool_template(tokenizer: Any, prompt: Prompt) -> None:
    """Raise PromptError unless the chat template shows tools, calls and their results, also to a policy that continues
    from its own call."""
    if tokenizer in _shows_tools:
        return
    parts = ("offer", "name", "key", "value", "result")
    offer, name, key, value, result = marks = [f"winnow_{part}" for part in parts]
    call = {"type": "function", "function": {"name": name, "arguments": {key: value}}}
    schema = {"type": "function", "function": {"name": offer, "description": "", "parameters": {"type": "object"}}}
    results: list[Message] = [{"role": "tool", "name": name, "content": result}]
    messages = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, *results]
    shown = error = ""
    try:
        shown = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False)
    except Exception as raised:  # any error of a template
        error = f" ({type(raised).__name__}: {raised})"
    if missing := [part for part, mark in zip(parts, marks, strict=True) if mark not in shown]:
        raise PromptError(
            f"prompt '{prompt.id}' has tools, but the chat template leaves out their {', '.join(missing)}; use a model "
            f"or template made for tool calls{error}"
        )
    ids = encode_observation(tokenizer, prompt, NextMessages(results), np.array([], np.int64))
    if result not in tokenizer.decode(ids):
        raise PromptError(
            f"prompt '{prompt.id}' has tools, but the chat template does not show a result behind its call, so turns "
            "cannot be joined; set chat_template to one that does"
        )
    _shows_tools.add(tokenizer)


def encode_observation(tokenizer: Any, prompt: Prompt, observation: str, sampled: np.ndarray) -> list[int]:
    """Return token ids of an observation between two turns; sampled tokens are never re-tokenized.

    For messages these are the template's tokens from the end of the assistant's turn or call to where the policy
    continues; a sampled end of turn is not repeated. Parts of earlier turns that the template would remove, such as
    thoughts, stay. Raises PromptError when the template cannot show the observation.
    """
    before: Sequence[Message] = prompt.messages or [_QUESTION]
    added: Sequence[Message] = [{"role": "user", "content": observation}]
    tools = prompt.tools
    if isinstance(observation, NextMessages):
        added, tools = observation.messages, tools or observation.tools
        if added[0]["role"] == "tool":
            before = [_QUESTION]
    elif prompt.messages is None:
        return list(tokenizer.encode(observation, add_special_tokens=False))
    if is_begun(before):
        before = before[:-1] or [_QUESTION]
    templates = tokenizer.chat_template
    named = dict(prompt.template_values)
    if tools and isinstance(templates, dict) and "tool_use" in templates:
        named["chat_template"] = "tool_use"
    try:
        return joined(tokenizer, before, added, sampled, named)
    except Exception as error:  # any error of a template
        raise PromptError(
            f"prompt '{prompt.id}': the chat template cannot join turns: {error}; set chat_template to one that keeps "
            "what it has shown"
        ) from None


def _hidden_ids(tokenizer: Any) -> set[int | None]:
    return {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}


def decode(tokenizer: Any, sequences: Sequence[np.ndarray]) -> list[str]:
    """Return the texts of sequences with special tokens such as `<think>`, but without bos, eos and padding."""
    hidden = _hidden_ids(tokenizer)
    return _decoded(tokenizer, [[token for token in ids.tolist() if token not in hidden] for ids in sequences])


class TurnTexts:
    """Texts of turns, by a tokenizer whose special tokens stay as they are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._hidden = _hidden_ids(tokenizer)
        self._special: dict[int, bool] = {}
        """Whether a token that has ended a turn is a special one."""

    def of(self, turns: Sequence[tuple[np.ndarray, str]]) -> list[str]:
        """Return the texts of turns, given as tokens and stop reason; without a special token that only ended one."""
        shown = []
        for tokens, reason in turns:
            ids = tokens.tolist()
            if reason == "eos" and ids and self._is_special(ids[-1]):
                ids.pop()
            shown.append([token for token in ids if token not in self._hidden])
        return _decoded(self._tokenizer, shown)

    def _is_special(self, token: int) -> bool:
        if token not in self._special:
            self._special[token] = not _decoded(self._tokenizer, [[token]], skip_special_tokens=True)[0]
        return self._special[token]


def decode_whole(tokenizer: Any, ids: np.ndarray) -> str:
    """Return the text of a sequence with every special token, for parsers of tool calls."""
    return _decoded(tokenizer, [ids.tolist()])[0]


def _decoded(tokenizer: Any, ids: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
    """Return the texts of sequences by the tokenizer's own decoder, which is faster than the tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and sum(map(len, ids)) > ONE_BY_ONE:
        return list(backend.decode_batch(ids, skip_special_tokens=skip_special_tokens))
    one = tokenizer if backend is None else backend
    return [one.decode(each, skip_special_tokens=skip_special_tokens) for each in ids]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 over vocabulary and chat templates."""
    templates = tokenizer.chat_template
    shown = json.dumps(templates, sort_keys=True) if isinstance(templates, dict) else str(templates)
    content = json.dumps(tokenizer.get_vocab(), sort_keys=True) + shown
    return hashlib.sha256(content.encode()).hexdigest()


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to and including the first complete stop string; its token may have had more characters."""
    ends = [text.index(s) + len(s) for s in stop if s in text]
    return text[: min(ends)] if ends else text


def stop_string_of(text: str, stop: Sequence[str]) -> str:
    """Return the longest stop string that a text ends with, or empty text."""
    return max((s for s in stop if text.endswith(s)), key=len, default="")
