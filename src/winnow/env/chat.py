"""Chat templates: messages as text, and the tokens that join two turns of an assistant.

The template defines the end of a turn. It may differ from the tokenizer's end of sequence and may be several tokens.
It is derived by rendering a turn whose content is a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..types import Message

MARK = "\u241fwinnow\u241f"
"""Message that no template contains."""
_CALL_MARK = "winnow_mark"
"""Plain letters: templates write arguments in their own ways."""
_USER: Message = {"role": "user", "content": "?"}
_OPENING = re.compile(r"\s*(<[^<>\s]+>|\[[A-Z_]+\])")


class PromptError(ValueError):
    """A prompt unusable with this model; the message names the prompt and the remedy."""


def is_begun(messages: Sequence[Message]) -> bool:
    """Return whether messages end in an assistant's turn that the policy continues."""
    last = messages[-1]
    return last["role"] == "assistant" and last.get("content") is not None and not last.get("tool_calls")


def messages_in(value: Any) -> tuple[Message, ...] | None:
    """Return a row's list of messages, each without the keys that only other rows fill; None for any other value."""
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) and "role" in m for m in value):
        return None
    return tuple({key: given for key, given in message.items() if given is not None} for message in value)


def with_text(message: Message, text: str) -> Message:
    """Return a message with text added to the end of its content, which is text or a list of parts."""
    content: Any = message.get("content")
    if isinstance(content, list | tuple):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content or ''}{text}"}


def templates_of(tokenizer: Any) -> dict[str, str]:
    """Return the tokenizer's chat templates by name; a single one is `default`."""
    given = getattr(tokenizer, "chat_template", None)
    return dict(given) if isinstance(given, Mapping) else {} if given is None else {"default": given}


@lru_cache(maxsize=64)
def variables_of(template: str) -> frozenset[str] | None:
    """Return the names that a template leaves to its caller; None if it cannot be parsed here."""
    from jinja2 import Environment, TemplateError, meta

    try:
        return frozenset(
            meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
        )
    except TemplateError:  # custom tags; transformers reports real errors
        return None


def template_variables(tokenizer: Any) -> frozenset[str] | None:
    """Return the variables that a row may give to the tokenizer's templates; None if one cannot be parsed."""
    variables = [variables_of(template) for template in templates_of(tokenizer).values()]
    if None in variables:
        return None
    return frozenset[str]().union(*(each or () for each in variables)) - {"messages", "add_generation_prompt"}


def rendered(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """Return messages as text, up to where the policy continues: a generation prompt, or a turn begun by them.

    Raises PromptError for contents other than text, and any error of the template.
    """
    plain: list[Message] = []
    parts: list[str] = []
    for message in messages:
        content: Any = message.get("content")
        if isinstance(content, list | tuple):
            texts = [text_of(part) for part in content]
            parts += texts
            message = {**message, "content": "".join(texts)}
        plain.append(message)
    if parts:  # some templates drop them silently, others require them
        with suppress(Exception):  # any error of a template that requires parts
            text = _ready(tokenizer, plain, options)
            if all(part.strip() in text for part in parts):
                return text
    return _ready(tokenizer, messages, options)


def text_of(part: Mapping[str, Any]) -> str:
    """Return the text of a part of a message. Raises PromptError if it has no text."""
    if not isinstance(part.get("text"), str):
        kind = part.get("type")
        raise PromptError(f"a message has a part of type '{kind}'; the model is given text only: remove it")
    return str(part["text"])


def _ready(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    if is_begun(messages):
        return _continued(tokenizer, messages, options)
    return applied(tokenizer, messages, add_generation_prompt=True, **options)


def applied(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """Return what the chat template makes of messages.

    A template that needs objects as arguments of calls gets such, whatever the policy wrote. Raises any error of the
    template.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception:
        mended = [_with_object_arguments(message) for message in messages]
        if mended == list(messages):
            raise
        return str(tokenizer.apply_chat_template(mended, tokenize=False, **options))


def _with_object_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls or not all(isinstance(call.get("function"), Mapping) for call in calls):
        return message
    return {**message, "tool_calls": [{**c, "function": _with_object(c["function"])} for c in calls]}


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**function, "arguments": arguments if isinstance(arguments, Mapping) else {"arguments": arguments}}


def _continued(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """Return messages as text without the end of the last turn.

    A template that extracts thoughts from a turn (Qwen3's) shows an empty, closed one before a thought that is only
    begun, or refuses it. The begun turn then follows the header of an earlier turn, or the generation prompt.
    """
    *before, last = messages
    refusal: Exception | None = None
    try:
        text = applied(tokenizer, messages, continue_final_message=True, **options)
    except Exception as error:  # any error of a template, or of the search for the end of the turn
        refusal = error
    opening = _OPENING.match(last["content"]) if isinstance(last["content"], str) else None
    if refusal is None and (opening is None or not before):
        return text
    if refusal is not None and (not before or not isinstance(last["content"], str)):
        raise refusal
    try:
        known = applied(tokenizer, before, **options)
        marked = applied(tokenizer, [*before, {**last, "content": MARK}, _USER], **options)
        ready = applied(tokenizer, before, add_generation_prompt=True, **options)
    except Exception:  # it requires other turns
        if refusal is not None:
            raise refusal from None
        return text
    header, mark, _ = marked.partition(MARK)
    choices = [] if refusal is not None else [text]
    choices += [header + last["content"]] if mark else []
    tag = opening[1] if opening else ""
    opened = bool(tag) and ready.rstrip().endswith(tag)
    choices.append((ready.rstrip().removesuffix(tag) if opened else ready) + last["content"])
    right = known.count(tag) + last["content"].count(tag)
    return next((choice for choice in choices if not tag or choice.count(tag) == right), choices[0])


@dataclass(frozen=True)
class _Turns:
    """How a chat template ends the turns of an assistant."""

    marks: frozenset[int]
    """Added tokens: more than a piece of text."""
    special: frozenset[int]
    ends: frozenset[int]
    """Marks that end a turn."""
    end: int | None
    """The first of `ends` in a last turn, or None."""
    text: str
    """End of a turn in ordinary text, or empty text."""


_KNOWN: WeakKeyDictionary[Any, dict[str, _Turns]] = WeakKeyDictionary()


def _turns(tokenizer: Any, options: Mapping[str, Any]) -> _Turns:
    template = str(tokenizer.get_chat_template(options.get("chat_template")))
    known = _KNOWN.setdefault(tokenizer, {})
    if template not in known:
        known[template] = _derived(tokenizer, options)
    return known[template]


def _derived(tokenizer: Any, options: Mapping[str, Any]) -> _Turns:
    added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    marks, special = frozenset(added), frozenset(i for i, token in added.items() if token.special)
    turn: Message = {"role": "assistant", "content": MARK}
    try:
        alone = _behind(MARK, applied(tokenizer, [_USER, turn], **options))
        followed = _behind(MARK, applied(tokenizer, [_USER, turn, _USER], add_generation_prompt=True, **options))
    except Exception:  # it requires other turns: turns that begin with a mark can still be joined
        return _Turns(marks, special, frozenset(), None, "")
    alone_ids, followed_ids = _encoded(tokenizer, alone), _encoded(tokenizer, followed)
    same = common_prefix(alone_ids, followed_ids)
    ends = marks.intersection(alone_ids[:same])
    if not ends and same < min(len(alone_ids), len(followed_ids)):
        last, other = alone_ids[same], followed_ids[same]
        if {last, other} <= marks and followed_ids.count(other) > 1:  # the last turn ends unlike all others
            ends = frozenset((last, other))
    text = alone if not ends and followed.startswith(alone) else ""
    end = next((token for token in alone_ids if token in ends), None)
    return _Turns(marks, special, ends, end, text.rstrip() or text)


def end_of_turn(tokenizer: Any) -> int:
    """Return the token to train as the end of an assistant's turn: the template's own, else the end of sequence."""
    turns = _turns(tokenizer, {})
    eos = int(tokenizer.eos_token_id)
    return eos if turns.end is None or eos in turns.ends else turns.end


def joined(
    tokenizer: Any,
    before: Sequence[Message],
    added: Sequence[Message],
    sampled: np.ndarray,
    options: Mapping[str, Any],
) -> list[int]:
    """Return the tokens from the unsampled end of an assistant's turn to where the policy continues.

    `added` are the messages after the turn; results of tools follow a call. Raises PromptError if the template does
    not show the turn before them, and any error of the template.
    """
    turn: Message = {"role": "assistant", "content": MARK}
    mark = MARK
    if added[0]["role"] == "tool":
        call = {"name": added[0]["name"], "arguments": {"key": _CALL_MARK}}
        turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        mark = _CALL_MARK
    turns = _turns(tokenizer, options)
    text = _behind(mark, rendered(tokenizer, [*before, turn, *added], **options))
    ids = _encoded(tokenizer, text)
    start, ends = 0, turns.ends
    if mark == _CALL_MARK:
        alone = _encoded(tokenizer, _behind(mark, applied(tokenizer, [*before, turn], **options)))
        start = _end_of_call(turns, ids, alone)
        ends |= {*ids[start : start + 1]} & turns.special & set(alone[start : start + 1])
    elif turns.text and text.startswith(turns.text) and _ends_with(tokenizer, sampled, turns.text):
        return _encoded(tokenizer, text[len(turns.text) :])
    return _unsampled(tokenizer, ids, start, ends, turns.marks, sampled)


def _end_of_call(turns: _Turns, ids: Sequence[int], alone: Sequence[int]) -> int:
    """Return the index in `ids`, tokens after an argument of a call, of the turn's end; `alone`: without results."""
    same = common_prefix(ids, alone)
    for i in range(min(same + 1, len(ids))):
        if ids[i] in turns.ends:
            return i
    last = max((i for i, token in enumerate(alone) if token in turns.special), default=-1)
    return last if 0 <= last < same == len(alone) else same  # some end a call unlike a text


def _unsampled(
    tokenizer: Any, ids: list[int], start: int, ends: frozenset[int], marks: frozenset[int], sampled: np.ndarray
) -> list[int]:
    """Return `ids` from `start` on, without a sampled end of turn.

    Where a template ends turns with nothing, the policy ends them with the mark that begins the next one. Ordinary
    tokens do not count: a cut-off turn may end in the same one by chance.
    """
    stop, first = start, 0
    for i in range(start, len(ids)):
        if not first and ids[i] in marks:
            first = i + 1
        if ids[i] in ends:
            stop = i + 1
        elif tokenizer.decode([ids[i]]).strip():
            break
    region = ids[: stop if stop > start else first]
    last = int(sampled[-1]) if len(sampled) else None
    if last in marks and last in region:
        return ids[len(region) - region[::-1].index(last) :]
    return ids[stop:] if last in ends else ids[start:]


def _ends_with(tokenizer: Any, sampled: np.ndarray, text: str) -> bool:
    tail = [int(token) for token in sampled[-4 * len(text) :]]
    return str(tokenizer.decode(tail, clean_up_tokenization_spaces=False)).endswith(text)


def _behind(mark: str, text: str) -> str:
    _, separator, tail = text.rpartition(mark)
    if not separator:
        raise PromptError("the chat template leaves out what the assistant said or called once more follows")
    return tail


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Return the length of the longest common prefix of two sequences of tokens."""
    n = min(len(a), len(b))
    differs = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differs.argmax()) if differs.any() else n
