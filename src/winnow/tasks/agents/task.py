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

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...base.files import digest
from ...env.base import OverlappingEnv, RewardFn, Task
from ...env.dataset import DatasetConfig
from ...env.prompt_store import changed
from ...env.tools import Parser, parse_tool_calls
from ...env.workers.calls import Deadlines
from ...env.workers.functions import function_name, load_function, parameters_of
from ...types import Prompt
from .conversation import AgentEnv
from .endpoint import MODEL, Endpoint
from .event_loop import AgentLoop

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
            super().build(),  # type: ignore[arg-type]
            load_function(self.agent),
            max_turns=self.max_turns,
            max_turn_length=self.max_turn_length,
            timeout_s=self.timeout_s,
        )


class AgentTask:
    """A task of one turn with an agent that may ask the policy repeatedly.

    `agent` is a function, plain or async, of any of: `base_url`, `api_key` and `model` for its client, `prompt`, and
    the columns of the row. It returns the reward, a dict of rewards by agent, or None to leave it to reward
    functions. It runs in its own thread. Its exceptions fail the rollout, which is then left out: for the policy's
    errors an agent returns 0. `parse` finds tool calls, where a request offers tools. Settings of requests are
    honoured, refused by name, or the run's (`settings.py`). `max_turn_length` is the most tokens of an answer, by
    default the rest of the rollout's. `timeout_s` bounds the agent between two requests; it cannot be killed, but its
    later requests get no answer. Raises ValueError when the task has its own turns, or the agent names an unknown
    argument.
    """

    def __init__(
        self,
        task: Task,
        agent: Agent,
        *,
        parse: Parser = parse_tool_calls,
        max_turns: int = 16,
        max_turn_length: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if task.max_turns != 1:
            raise ValueError(f"with_agent: task {task.name} has an environment of its own; give a task of one turn")
        if max_turns < 1:
            raise ValueError(f"with_agent: max_turns must be at least 1, not {max_turns}")
        self._parameters = parameters_of(agent)
        some = next(iter(task.train), None)
        known = {*GIVEN, *(some.columns if some is not None else self._parameters)}
        if missing := [name for name, required in self._parameters.items() if required and name not in known]:
            wants, has = ", ".join(missing), ", ".join(sorted(known))
            raise ValueError(f"agent {function_name(agent)}: it wants {wants}, but there is only {has}")
        self.name, self.stop = task.name, task.stop
        self.train, self.test = changed(task.train, _without_tools), changed(task.test, _without_tools)
        self.reward_funcs: Sequence[RewardFn] = task.reward_funcs
        self.rewards_itself = getattr(task, "rewards_itself", False)
        self.max_turns, self.max_turn_length = max_turns, max_turn_length
        self._task, self._agent, self._parse, self._deadlines = task, agent, parse, Deadlines(timeout_s)
        self._endpoint: Endpoint | None = None
        self._loop = AgentLoop(f"agent {function_name(agent)}")

    def make_env(self, prompt: Prompt) -> OverlappingEnv:
        if self._endpoint is None:
            self._endpoint = Endpoint()
            weakref.finalize(self, self._endpoint.close)
        shown: Any = list(prompt.messages) if prompt.messages is not None else prompt.text
        values = {"prompt": shown, **prompt.columns, "api_key": "unused", "model": MODEL}
        if "**" not in self._parameters:
            values = {name: value for name, value in values.items() if name in self._parameters}
        return AgentEnv(partial(self._agent, **values), self._parse, self._endpoint, self._deadlines, self._loop)

    def fingerprint(self) -> str:
        own = [function_name(self._agent), self.max_turns, self.max_turn_length]
        return digest([self._task.fingerprint(), *own])


with_agent = AgentTask


def _without_tools(prompt: Prompt) -> Prompt:
    """Return a prompt that does not show its row's tools: the agent offers its own in every request."""
    values = {name: value for name, value in prompt.template_values.items() if name != "tools"}
    return replace(prompt, template_values=values) if len(values) < len(prompt.template_values) else prompt
