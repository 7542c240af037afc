"""One rollout shared by two sides: an agent that asks and waits, and the policy that answers turn by turn."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...env.prompting import NextMessages
from ...env.tools import Parser
from ...env.workers.calls import Owed
from ...types import Message
from .messages import added_to, answer_of


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
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens of the answer."""


@dataclass(eq=False)
class Request:
    """A request of the agent, and the answer owed to it."""

    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    with_stop: bool
    """Whether it wants the stop string that ends an answer."""
    agent: str
    reply: Owed = field(default_factory=Owed)

    def same_as(self, other: Request) -> bool:
        return (self.messages, self.tools, self.agent) == (other.messages, other.tools, other.agent)


@dataclass
class History:
    """Messages of a segment: its last request, followed by the answer."""

    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    agent: str


class Conversation:
    """Thread-safe. The agent's side: `ask`, `returned`, `failed`; the rollout's: `next`, `answer`, `close`.

    Requests are answered one at a time. One that continues the messages of an earlier request adds to its history, else
    it begins a new one: a segment of the rollout.
    """

    def __init__(self, parse: Parser) -> None:
        self._parse = parse
        self._lock = threading.Lock()
        self._next = Owed()
        self._waiting: deque[Request] = deque()
        self._with_policy: Request | None = None
        """Request with the policy."""
        self._requests: list[Request] = []
        """Every request of the agent, answered or not."""
        self._histories: list[History] = []
        """By segment."""
        self._end: Callable[[Owed], None] | None = None
        """Settles what the policy waits for, once the agent has ended."""
        self._turns = 0
        self._over = ""

    def ask(
        self,
        messages: list[Message],
        tools: tuple[Mapping[str, Any], ...],
        with_stop: bool = False,
        *,
        agent: str = "",
        retried: bool | None = None,
    ) -> Answer:
        """Wait for the policy's answer and return it.

        A request that a client repeats after a lost connection gets the same answer. `retried`: whether the client says
        that it repeats one; None: it says nothing, and a request equal to the last one is a repetition. Raises
        OverError when the rollout has ended.
        """
        request = Request(messages, tools, with_stop, agent)
        with self._lock:
            if self._over:
                raise OverError(self._over)
            repeatable = self._requests if retried else [] if retried is False else self._requests[-1:]
            repeated = next((earlier for earlier in reversed(repeatable) if request.same_as(earlier)), None)
            if repeated is None:
                self._requests.append(request)
                self._waiting.append(request)
                self._pass_on()
            else:
                request = repeated
        answer: Answer = request.reply.future.result()
        return answer

    def _pass_on(self) -> None:
        """Give the policy the agent's end or, if it has no request, the next one."""
        if self._end is not None:
            self._end(self._next)
        elif self._with_policy is None and self._waiting:
            self._with_policy = request = self._waiting.popleft()
            self._next.succeed(self._as_observation(request))

    def _as_observation(self, request: Request) -> NextMessages:
        last = len(self._histories) - 1
        for number in range(last, -1, -1):
            history = self._histories[number]
            if (history.tools, history.agent) != (request.tools, request.agent):
                continue
            if (added := added_to(history.messages, request.messages)) is not None:
                continues = -1 if number == last else number
                self._begin_or_go_on(request, continues)
                return NextMessages(added, request.tools, continues, request.messages, request.agent)
        self._begin_or_go_on(request, None)
        return NextMessages(request.messages, request.tools, None, request.messages, request.agent)

    def _begin_or_go_on(self, request: Request, continues: int | None) -> None:
        """Only the last segment grows; an earlier history goes on in a segment of its own, with the same tokens."""
        if continues == -1:
            self._histories.pop()
        self._histories.append(History(list(request.messages), request.tools, request.agent))

    def returned(self, value: Any) -> None:
        with self._lock:
            self._end = lambda owed: owed.succeed(Returned(value))
            self._pass_on()

    def failed(self, error: BaseException) -> None:
        with self._lock:
            self._end = lambda owed: owed.fail(error)
            self._pass_on()

    async def next(self) -> NextMessages | Returned:
        """Return the agent's next request: its messages after the last answer, or all of them. Raises the agent's
        error."""
        asked: NextMessages | Returned = await asyncio.wrap_future(self._next.future)
        return asked

    def answer(self, text: str, *, cut: bool = False) -> Message:
        """Pass the policy's text to the agent, and return it as a message."""
        with self._lock:
            request = self._with_policy
            assert request is not None
            message = answer_of(text, self._parse if request.tools else None, self._turns, request.with_stop)
            self._turns += 1
            self._histories[-1].messages.append(message)
            self._next, self._with_policy = Owed(), None
            prompt_tokens, tokens = getattr(text, "prompt_tokens", 0), getattr(text, "tokens", 0)
            request.reply.succeed(Answer(message, cut, prompt_tokens, tokens))
            self._pass_on()
        return message

    def close(self, why: str = "the rollout has ended") -> None:
        """End the conversation; pending and later requests raise OverError."""
        with self._lock:
            self._over = self._over or why
            self._next.fail(OverError(self._over))
            for request in (*self._waiting, self._with_policy):
                if request is not None:
                    request.reply.fail(OverError(self._over))
            self._waiting.clear()
