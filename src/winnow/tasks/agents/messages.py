"""Chat messages of a request, as chat templates take them, and answers of the policy, as clients take them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...env.base import before_stop
from ...env.tools import Parser, message_of
from ...types import Message


def messages_of(given: Any) -> list[Message]:
    """Return the `messages` of a request. Raises ValueError naming the first invalid or non-text one."""
    if not isinstance(given, list) or not given:
        raise ValueError("messages: give a list of at least one message")
    messages: list[Message] = []
    names: dict[str, str] = {}
    for number, each in enumerate(given):
        try:
            message = _message(each, names)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(f"messages[{number}]: {error}") from None
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if call.get("id")}
        messages.append(message)
    return messages


def _message(given: Any, names: Mapping[str, str]) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise TypeError("a message must be an object with a role")
    role = "system" if given["role"] == "developer" else given["role"]
    message: Message = {"role": role, "content": _text(given.get("content"))}
    if given.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    if role == "tool":
        message["name"] = given.get("name") or names.get(str(given.get("tool_call_id"))) or ""
        if not message["name"]:
            raise ValueError(f"tool_call_id {given.get('tool_call_id')!r} is of no earlier call")
    return message


def _text(content: Any) -> str:
    if isinstance(content, list):
        if kinds := {part.get("type") for part in content} - {"text"}:
            raise ValueError(f"the policy reads text alone, no {', '.join(map(str, kinds))}")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise TypeError(f"content must be a text, not {type(content).__name__}")
    return content or ""


def _call(given: Any) -> dict[str, Any]:
    """Return a call with its arguments as an object, the form shown by chat templates.

    Arguments that are no JSON stay a text: the policy may have written them, and its mistakes are its own.
    """
    name, arguments = given["function"]["name"], given["function"].get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"id": given.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def tools_of(given: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the `tools` of a request. Raises ValueError for anything but a function schema."""
    tools = given or []
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools
    ):
        raise ValueError("tools: give a list of function schemas")
    return tuple(tools)


def answer_of(text: str, parse: Parser | None, turn: int, *, with_stop: bool, one_call: bool) -> Message:
    """Return the policy's text as a message; `parse` finds tool calls, where the request offered tools.

    A stop string that ended the turn is left out, as in OpenAI's API, unless the request wants it. `one_call`: calls
    after the first are left out, as in vLLM.
    """
    message = message_of(text, parse) if parse else None
    if message is None:
        return {"role": "assistant", "content": text if with_stop else before_stop(text)}
    calls = message["tool_calls"][:1] if one_call else message["tool_calls"]
    named = [{"id": f"call_{turn}_{i}", **call} for i, call in enumerate(calls)]
    return {**message, "tool_calls": named}


def wire(message: Message) -> dict[str, Any]:
    """Return an answer in the form of OpenAI's API."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        call | {"function": {"name": f["name"], "arguments": json.dumps(f["arguments"], ensure_ascii=False)}}
        for call in message["tool_calls"]
        for f in (call["function"],)
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def added_to(known: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """Return the messages after the known ones; None if those were changed, or nothing was added."""
    if len(messages) <= len(known):
        return None
    for before, now in zip(known, messages, strict=False):
        if _essence(before) != _essence(now):
            return None
    return tuple(messages[len(known) :])


def request_key(messages: Sequence[Message], tools: Sequence[Any], agent: str, again: int) -> int:
    """Return 64 bits that identify a request in its rollout; `again`: number of equal ones before it."""
    content = json.dumps([[_essence(m) for m in messages], list(tools), agent, again], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest())


def _essence(message: Message) -> tuple[Any, ...]:
    """Return the fixed part of a message: clients strip white space and rewrite ids and empty contents."""
    calls = [json.dumps(call["function"], sort_keys=True) for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), calls
