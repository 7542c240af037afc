"""One rollout shared by two sides: an agent that asks and waits, and the policy that answers turn by turn."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Real
from typing import Any

from ...env.base import EnvReport, StepResult
from ...env.prompting import NextMessages, TurnSettings
from ...env.tools import Parser, action_of
from ...env.workers.calls import Deadlines, Owed, converted
from ...env.workers.functions import describe_error, function_name
from ...types import Message
from .endpoint import Answer, Client, Endpoint, OverError
from .event_loop import AgentLoop
from .messages import added_to, answer_of, request_key

UNMARKED = (
    "its client sends equal requests without saying whether it repeats one; each gets an answer of its own, unless the "
    "connection of the one before was closed. Send the header X-Stainless-Retry-Count: 1 with a repetition, as openai "
    "does"
)
RETRYING_S = 10.0
"""Seconds that an agent has to return, at a limit, once it repeats a request that was refused."""
CATCH = (
    "so it gave no reward. Catch the refusal (openai.APIStatusError, status 410) and return what was earned until then"
)


@dataclass(frozen=True)
class Returned:
    """The agent has returned."""

    value: Any


@dataclass(eq=False)
class Request:
    """A request of the agent, and the answer owed to it."""

    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    with_stop: bool
    """Whether it wants the stop string that ends an answer."""
    agent: str
    max_tokens: int | None
    stop: tuple[str, ...]
    one_call: bool
    """Whether it wants one tool call at most."""
    reply: Owed = field(default_factory=Owed)
    clients: list[Client] = field(default_factory=list)
    """Connections that wait for the answer: several where a client repeats the request."""
    outlived: bool = False
    """Whether the agent returned without the answer."""
    quoted: bool = False
    """Whether a later request has the answer: it was read, though the connection was reset after it."""

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the answer or has had it."""
        return self.outlived or (not self.quoted and all(client.gone for client in self.clients))

    @cached_property
    def key(self) -> int:
        """What `request_key` gives the first such request."""
        return request_key(self.messages, self.tools, self.agent, 0)

    def same_as(self, other: Request) -> bool:
        names = ("messages", "tools", "agent", "max_tokens", "stop", "one_call")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def continued_by(self, other: Request) -> tuple[Message, ...] | None:
        """Return the messages that another request adds to this one and its answer; None if it does not continue it."""
        if (self.tools, self.agent) != (other.tools, other.agent):
            return None
        return added_to([*self.messages, self.reply.future.result().message], other.messages)


class AgentEnv:
    """Implements `OverlappingEnv`: the agent's requests are its observations, and its return ends the rollout.

    Thread-safe. Requests are answered one at a time. One that continues the messages of an earlier request adds to its
    history, else it begins a new one: a segment of the rollout.
    """

    def __init__(
        self, agent: partial[Any], parse: Parser, endpoint: Endpoint, deadlines: Deadlines, loop: AgentLoop
    ) -> None:
        self._agent, self._label, self._parse = agent, f"agent {function_name(agent.func)}", parse
        self._loop = loop
        self._endpoint, self._deadlines = endpoint, deadlines
        self._address = endpoint.open(self.ask)
        self._lock = threading.Lock()
        self._next = Owed()
        """What the policy waits for: a request as an observation, or the agent's return or error."""
        self._waiting: deque[Request] = deque()
        self._with_policy: Request | None = None
        self._requests: list[Request] = []
        """Every request of the agent, answered or not."""
        self._segments: list[Request] = []
        """The last request of each segment."""
        self._ended = Owed()
        """What the agent returned or raised."""
        self._answered: list[Request] = []
        """Requests by turn."""
        self._over = False
        self._closed = Owed()
        self._refused: list[Request] = []
        """Requests since the rollout is over."""
        self._retrying = Owed()
        """Done once the agent repeats a refused request."""
        self._agents: set[str] = set()
        """Names under which the agent asked, answered or not."""
        self._notes: list[str] = []
        """What the user should know about the rollout."""

    # ------------------------------------------------------------ the agent's side

    def ask(self, messages: list[Message], *, retried: bool | None, client: Client, **settings: Any) -> Answer:
        """Wait for the policy's answer and return it.

        A request equal to one whose client is gone gets that one's answer: clients repeat requests after a timeout or
        a lost connection. `retried`: whether the client says that it repeats one; None: it says nothing. Otherwise an
        equal request gets an answer of its own. Raises OverError when the rollout has ended.
        """
        request = Request(messages, **settings)
        self._agents.add(request.agent)
        with self._lock:
            if self._over:
                self._note_refused(request)
                raise OverError
            equal = [earlier for earlier in reversed(self._requests) if request.same_as(earlier)]
            left = [earlier for earlier in equal if earlier.abandoned]
            if left or (retried and equal):
                request = (left or equal)[0]
            else:
                self._requests.append(request)
                self._waiting.append(request)
                if equal and retried is None:
                    self._endpoint.warn("equal requests", text=UNMARKED)
            request.clients.append(client)
            self._pass_on()
        answer: Answer = request.reply.future.result()
        return answer

    def _note_refused(self, request: Request) -> None:
        if any(request.same_as(earlier) for earlier in self._refused):
            self._retrying.succeed(None)
        else:
            self._refused.append(request)

    def _run(self) -> None:
        self._ended.complete(self._returned)
        with self._lock:
            if self._with_policy is not None:
                self._with_policy.outlived = not self._with_policy.reply.future.done()
            self._pass_on()

    def _returned(self) -> Returned:
        try:
            value = self._agent(base_url=self._address)
            if inspect.isawaitable(value):
                value = self._loop.run(value, self._closed.future, self._deadlines.timeout_s)
            return Returned(value)
        except BaseException as error:
            raise RuntimeError(f"{self._label} raised {describe_error(error)}{self._unasked}") from None

    @property
    def _unasked(self) -> str:
        return self._endpoint.unasked(self._address)

    def _pass_on(self) -> None:
        """Give the policy the agent's end or, if it has no request, the next one."""
        if self._ended.future.done():
            self._next.complete(self._ended.future.result)
            return
        while self._with_policy is None and self._waiting:
            request = self._waiting.popleft()
            if request.abandoned:  # a repetition of it is a new request
                self._requests.remove(request)
                request.reply.fail(OverError())
                continue
            self._with_policy = request
            self._next.succeed(self._as_observation(request))

    def _as_observation(self, request: Request) -> NextMessages:
        """Only the last segment grows; an earlier history goes on in a segment of its own, with the same tokens."""
        added, continues = tuple(request.messages), None
        for number, earlier in reversed(list(enumerate(self._segments))):
            if (after := earlier.continued_by(request)) is not None:
                added, continues, earlier.quoted = after, number, True
                break
        if continues is not None and continues == len(self._segments) - 1:
            self._segments.pop()
            continues = -1
        self._segments.append(request)
        again = sum(r.key == request.key for r in self._requests[: self._requests.index(request)])
        key = request_key(request.messages, request.tools, request.agent, again)
        settings = TurnSettings(key, request.max_tokens, tuple(request.stop))
        return NextMessages(added, request.tools, continues, request.messages, request.agent, settings)

    # ------------------------------------------------------------ the policy's side

    def start_reset(self) -> Future[str | None]:
        threading.Thread(target=self._run, name="winnow-agent", daemon=True).start()
        return self._deadlines.submit_async(self._first)

    def start_step(self, text: str) -> Future[StepResult]:
        """Pass the policy's text to the agent."""
        with self._lock:
            request = self._with_policy
            assert request is not None
            parse, turn = self._parse if request.tools else None, len(self._answered)
            message = answer_of(text, parse, turn, with_stop=request.with_stop, one_call=request.one_call)
            self._answered.append(request)
            self._next, self._with_policy = Owed(), None
            request.reply.succeed(Answer(message, text))
            self._pass_on()
        calls = [call["function"] for call in message.get("tool_calls", ())]
        action = action_of([(c["name"], c["arguments"]) for c in calls]) if calls else None
        return self._deadlines.submit_async(lambda: self._after(action, message if calls else None))

    @property
    def winnow_report(self) -> EnvReport:
        with self._lock:
            requests = [*self._answered, *([] if self._with_policy is None else [self._with_policy])]
            abandoned = [turn for turn, request in enumerate(requests) if request.abandoned]
            return EnvReport(self._label, self._agents, abandoned, self._notes)

    def start_reward(self) -> Future[float | dict[str, float] | None]:
        """At a limit, refuse pending and later requests; give what the agent returns, or raise its earlier error."""
        if self._ended.future.done():  # no refusal is its cause
            return converted(self._ended.future, lambda returned: self._reward(returned.value))
        self._refuse()
        return self._deadlines.submit_async(self._at_limit)

    def close(self) -> None:
        """End the rollout; pending and later requests raise OverError."""
        self._endpoint.forget(self._address)
        self._refuse()
        self._closed.succeed(None)

    def _refuse(self) -> None:
        with self._lock:
            self._over = True
            for owed in (self._next, *(request.reply for request in self._requests)):
                owed.fail(OverError())

    async def _first(self) -> str | None:
        try:
            request: NextMessages | Returned = await asyncio.wrap_future(self._next.future)
        except asyncio.CancelledError:  # its time is over
            waited = f"took over {self._deadlines.timeout_s:g} s without asking the policy anything"
            raise TimeoutError(f"{self._label} {waited}{self._unasked}") from None
        if isinstance(request, Returned):
            raise RuntimeError(f"{self._label} ended without asking the policy anything{self._unasked}")
        return request

    async def _after(self, action: str | None, message: Message | None) -> StepResult:
        request: NextMessages | Returned = await asyncio.wrap_future(self._next.future)
        if not isinstance(request, Returned):
            return StepResult(request, action=action, message=message)
        return StepResult(None, self._reward(request.value), done=True, action=action, message=message)

    async def _at_limit(self) -> float | dict[str, float] | None:
        """Return the agent's reward after its requests were refused; None, with a note, if it gives none for that."""
        ended, retrying = (asyncio.wrap_future(owed.future) for owed in (self._ended, self._retrying))
        wait_s = 0.9 * self._deadlines.timeout_s  # before the call's own deadline
        limit = asyncio.get_running_loop().time() + wait_s
        await asyncio.wait((ended, retrying), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            left_s = limit - asyncio.get_running_loop().time()
            await asyncio.wait((ended,), timeout=min(RETRYING_S, left_s))
        if not ended.done():
            ended.cancel()
            self._notes.append(f"at a limit {self._label} did not return after its requests were refused; {CATCH}")
            return None
        try:
            returned: Returned = ended.result()
        except RuntimeError as error:
            self._notes.append(f"at a limit, where its requests are refused, {error}; {CATCH}")
            return None
        return self._reward(returned.value)

    def _reward(self, value: Any) -> float | dict[str, float] | None:
        if getattr(value, "shape", None) in ((), (1,)):  # a number of numpy or torch
            value = value.item()
        if isinstance(value, Mapping) and all(isinstance(v, Real) for v in value.values()):
            return {str(agent): float(reward) for agent, reward in value.items()}
        if not isinstance(value, Real | None):
            kind = type(value).__name__
            raise TypeError(f"{self._label} returned {kind}; it must be the reward, None, or a dict of agents' rewards")
        return None if value is None else float(value)
