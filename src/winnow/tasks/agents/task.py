"""Agents written for a `base_url`, under any task of one turn.

    def solve(question: str, answer: str, base_url: str, api_key: str, model: str) -> float:
        client = OpenAI(base_url=base_url, api_key=api_key)
        reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
        return float(answer in reply.choices[0].message.content)

    Trainer(model=..., env=with_agent(DatasetConfig("questions.jsonl").build(), solve)).train()

Every rollout runs the agent once. Its requests are the rollout's turns: the first one's messages are the prompt, later
additions are observations. A request that does not continue the last one (an edited or compacted history, a sub-agent)
begins a new segment of the rollout. Training uses the sampled tokens, never re-tokenized text.

Several agents in one rollout name themselves in `model`, e.g. `policy/proposer` and `policy/solver`; a returned dict,
`{"proposer": 1.0, "solver": 0.0}`, rewards each by its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from ...base.files import digest
from ...env.base import OverlappingEnv, RewardFn, StepResult, Task
from ...env.dataset import DatasetConfig
from ...env.tools import Parser, parse_tool_calls
from ...env.workers.calls import Deadlines
from ...env.workers.functions import describe_error, function_name, load_function, parameters_of
from ...types import Message, Prompt
from .conversation import Conversation, Returned
from .endpoint import MODEL, Endpoint

Agent = Callable[..., Any]
GIVEN = ("base_url", "api_key", "model", "prompt")


@dataclass(frozen=True)
class AgentConfig(DatasetConfig):
    """A data set (with all of its options) and an agent that works on its rows."""

    agent: str = ""
    """`package.module:function` or `path/to/file.py:function`."""
    max_turns: int = 16
    """Answered requests of a rollout."""
    max_turn_length: int | None = None
    """Tokens of one answer; None: the rest of `max_completion_length`."""
    timeout_s: float = 300.0
    """Seconds that the agent may take between an answer and its next request or its return."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.agent:
            raise ValueError("agent: give `agent`, the function that works on a row, e.g. my_agent.py:solve")

    def build(self) -> AgentTask:  # type: ignore[override]
        return with_agent(
            self.rows_alone(),  # type: ignore[arg-type]
            load_function(self.agent),
            max_turns=self.max_turns,
            max_turn_length=self.max_turn_length,
            timeout_s=self.timeout_s,
        )


def with_agent(
    task: Task,
    agent: Agent,
    *,
    parse: Parser = parse_tool_calls,
    max_turns: int = 16,
    max_turn_length: int | None = None,
    timeout_s: float = 300.0,
) -> AgentTask:
    """Return the task with an agent that may ask the policy repeatedly.

    `agent` is a function, plain or async, of any of: `base_url`, `api_key` and `model` for its client, `prompt`, and
    the columns of the row. It returns the reward, a dict of rewards by agent, or None to leave it to reward
    functions. It runs in its own thread. Its exceptions fail the rollout, which is then left out: for the policy's
    errors an agent returns 0. `parse` finds tool calls, where a request offers tools. Sampling settings of requests
    have no effect: those of the run hold. `max_turn_length` is the most tokens of an answer, by default the rest of the
    rollout's. `timeout_s` bounds the agent between two requests; it cannot be killed, but its later requests get no
    answer. Raises ValueError when the task has its own turns, or the agent names an unknown argument.
    """
    if task.max_turns != 1:
        raise ValueError(f"with_agent: task {task.name} has an environment of its own; give a task of one turn")
    if max_turns < 1:
        raise ValueError(f"with_agent: max_turns must be at least 1, not {max_turns}")
    wanted = parameters_of(agent)
    some = next(iter(task.train), None)
    known = {*GIVEN, *(some.columns if some is not None else wanted)}
    if missing := [name for name, required in wanted.items() if required and name not in known]:
        raise ValueError(
            f"agent {function_name(agent)}: it wants {', '.join(missing)}, but there is only {', '.join(sorted(known))}"
        )
    return AgentTask(task, agent, parse, max_turns, max_turn_length, Deadlines(timeout_s))


class AgentTask:
    """A task of one turn under an agent; made by `with_agent`."""

    def __init__(
        self,
        task: Task,
        agent: Agent,
        parse: Parser,
        max_turns: int,
        max_turn_length: int | None,
        deadlines: Deadlines,
    ) -> None:
        self.name, self.stop = task.name, task.stop
        self.train, self.test = task.train, task.test
        self.reward_funcs: Sequence[RewardFn] = task.reward_funcs
        self.max_turns, self.max_turn_length = max_turns, max_turn_length
        self._task, self._agent, self._parse, self._deadlines = task, agent, parse, deadlines
        self._wanted = parameters_of(agent)
        self._endpoint: Endpoint | None = None

    def make_env(self, prompt: Prompt) -> OverlappingEnv:
        if self._endpoint is None:
            self._endpoint = Endpoint()
            weakref.finalize(self, self._endpoint.close)
        conversation = Conversation(self._parse)
        asked: Any = [dict(m) for m in prompt.messages] if prompt.messages is not None else prompt.text
        values = {"prompt": asked, **prompt.columns, "api_key": "unused", "model": MODEL}
        values["base_url"] = address = self._endpoint.open(conversation)
        if "**" not in self._wanted:
            values = {name: value for name, value in values.items() if name in self._wanted}
        forget = partial(self._endpoint.forget, address)
        return AgentEnv(partial(self._agent, **values), conversation, forget, self._deadlines)

    def fingerprint(self) -> str:
        own = [function_name(self._agent), self.max_turns, self.max_turn_length]
        return digest([self._task.fingerprint(), *own])


class AgentEnv:
    """Implements `OverlappingEnv`: the agent's requests are its observations, and its return ends the rollout."""

    def __init__(
        self, agent: partial[Any], conversation: Conversation, forget: Callable[[], None], deadlines: Deadlines
    ) -> None:
        self._agent, self._label = agent, f"agent {function_name(agent.func)}"
        self._conversation, self._forget, self._deadlines = conversation, forget, deadlines

    def start_reset(self) -> Future[str | None]:
        threading.Thread(target=self._run, name="winnow-agent", daemon=True).start()
        return self._deadlines.submit_async(self._first)

    def start_step(self, text: str) -> Future[StepResult]:
        said = self._conversation.answer(text, cut=getattr(text, "stop_reason", None) == "length")
        calls = [call["function"] for call in said.get("tool_calls", ())]
        action = json.dumps([[c["name"], c["arguments"]] for c in calls], sort_keys=True) if calls else None
        return self._deadlines.submit_async(lambda: self._after(action, said if calls else None))

    def close(self) -> None:
        self._forget()
        self._conversation.close()

    def _run(self) -> None:
        try:
            value = self._agent()
            if inspect.isawaitable(value):
                value = asyncio.run(_wait(value))
        except BaseException as error:
            self._conversation.failed(RuntimeError(f"{self._label} raised {describe_error(error)}"))
        else:
            self._conversation.returned(value)

    async def _first(self) -> str | None:
        asked = await self._conversation.next()
        if isinstance(asked, Returned):
            raise RuntimeError(f"{self._label} ended without asking the policy anything")
        return asked

    async def _after(self, action: str | None, message: Message | None) -> StepResult:
        asked = await self._conversation.next()
        if not isinstance(asked, Returned):
            return StepResult(asked, action=action, message=message)
        return StepResult(None, self._reward(asked.value), done=True, action=action, message=message)

    def _reward(self, value: Any) -> float | dict[str, float] | None:
        if isinstance(value, Mapping) and all(isinstance(v, Real) for v in value.values()):
            return {str(agent): float(reward) for agent, reward in value.items()}
        if not isinstance(value, Real | None):
            kind = type(value).__name__
            raise TypeError(f"{self._label} returned {kind}; it must be the reward, None, or a dict of agents' rewards")
        return None if value is None else float(value)


async def _wait(value: Any) -> Any:
    return await value
