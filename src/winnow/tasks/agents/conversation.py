"""One rollout shared by two sides: an agent that asks and waits, and the policy that answers turn by turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...env.prompting import NextMessages
from ...env.tools import Parser
from ...env.workers.calls import Owed
from ...types import Message
from .messages import RequestError, added_to, answer_of


class OverError(RuntimeError):
    """The rollout has ended; further requests get no answer."""


@dataclass(frozen=True)
class Returned:
    """The agent has returned."""

    value: Any


@dataclass(frozen=True)
class Answer:
    """The policy's answer."""

    message: Message
    cut: bool
    """Whether it was cut off at the most tokens of a turn."""


class Conversation:
    """Thread-safe. The agent's side: `ask`, `returned`, `failed`; the rollout's: `next`, `answer`, `close`."""

    def __init__(self, parse: Parser) -> None:
        self._parse = parse
        self._lock = threading.Lock()
        self._next = Owed()
        self._reply: Owed | None = None
        self._known: list[Message] = []
        """Messages of the last request, followed by its answer if given."""
        self._request: tuple[list[Message], tuple[Mapping[str, Any], ...]] | None = None
        self._with_stop = False
        """Whether the last request wants the stop string that ends an answer."""
        self._turns = 0
        self._over = ""

    def ask(self, messages: list[Message], tools: tuple[Mapping[str, Any], ...], with_stop: bool = False) -> Answer:
        """Wait for the policy's answer and return it. A repeated request, sent by clients after a lost connection, gets
        the same answer.

        Raises RequestError, which also ends the rollout, if a request does not continue the previous one, and OverError
        when the rollout has ended.
        """
        with self._lock:
            if self._over:
                raise OverError(self._over)
            if (messages, tools) != self._request:
                try:
                    self._take(messages, tools)
                    self._with_stop = with_stop
                except RequestError as error:
                    self._next.fail(error)
                    raise
            reply = self._reply
        assert reply is not None
        answer: Answer = reply.future.result()
        return answer

    def _take(self, messages: list[Message], tools: tuple[Mapping[str, Any], ...]) -> None:
        if self._reply is not None and not self._reply.future.done():
            raise RequestError("another request of this rollout waits for its answer; ask one at a time")
        if self._request is not None and tools != self._request[1]:
            raise RequestError("other tools than in the request before; a rollout has one set of them")
        added = added_to(self._known, messages)
        self._reply, self._request, self._known = Owed(), (messages, tools), list(messages)
        self._next.succeed(NextMessages(added, tools))

    def returned(self, value: Any) -> None:
        with self._lock:
            self._next.succeed(Returned(value))

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self._next.fail(error)

    async def next(self) -> NextMessages | Returned:
        """Return the agent's next messages: all at first, afterwards those after the last answer. Raises the agent's
        error."""
        asked: NextMessages | Returned = await asyncio.wrap_future(self._next.future)
        return asked

    def answer(self, text: str, *, cut: bool = False) -> Message:
        """Pass the policy's text to the agent, and return it as a message."""
        with self._lock:
            assert self._reply is not None
            assert self._request is not None
            parse = self._parse if self._request[1] else None
            message = answer_of(text, parse, self._turns, self._with_stop)
            self._turns += 1
            self._known.append(message)
            self._next = Owed()
            self._reply.succeed(Answer(message, cut))
        return message

    def close(self, why: str = "the rollout has ended") -> None:
        """End the conversation; pending and later requests raise OverError."""
        with self._lock:
            self._over = self._over or why
            self._next.fail(OverError(self._over))
            if self._reply is not None:
                self._reply.fail(OverError(self._over))
