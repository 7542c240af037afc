"""Tools and environments written for TRL's GRPOTrainer, under any task of one turn.

    task = with_tools(task, [search], environment_factory=Shop)
    Trainer(model=..., env=task, reward_funcs=...).train()

Tools are plain or async functions with type hints and Google-style docstrings. An environment is a class with
`reset(**row) -> str | None`, an optional `get_reward() -> float`, and public methods that are tools. Calls of a turn
run, and their results return as messages of role `tool`; a turn without a call ends the rollout.
"""

from __future__ import annotations

import inspect
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from transformers.utils import get_json_schema

from ..base.files import digest
from ..types import Message, Prompt
from .base import EnvReport, OverlappingEnv, RewardFn, StepResult, Task
from .private import private
from .prompt_store import changed
from .prompting import NextMessages
from .tool_errors import ToolUnavailableError, is_unavailable
from .workers.calls import Deadlines, noticing_signals, shared_calls, warn_from_thread
from .workers.functions import describe_error, function_name

Tool = Callable[..., Any]
Factory = Callable[[], Any]
Call = tuple[str, Any]
"""Name and arguments."""
Parser = Callable[[str], list[Call]]

MAX_ITERATIONS = 16
NO_SIGNALS = (
    "it sets a signal handler, which fails in the thread where tools run; remove its own timeout: "
    "with_tools(timeout_s=...) bounds the calls of a turn"
)
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parse_tool_calls(text: str) -> list[Call]:
    """Parse calls in the format of Qwen and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    One malformed call voids all, as in TRL.
    """
    try:
        return [_checked(json.loads(call)) for call in _between(text, _OPEN, _CLOSE)]
    except (ValueError, RecursionError):
        return []


def _between(text: str, start: str, end: str) -> Iterator[str]:
    """Yield each text between two marks. A regular expression would rescan the rest for every `start`."""
    at = 0
    while (at := text.find(start, at)) >= 0 and (stop := text.find(end, at)) >= 0:
        yield text[at + len(start) : stop]
        at = stop + len(end)


class ResponseParser:
    """Parses calls by the tokenizer's own `response_template`. Raises ValueError without one."""

    def __init__(self, tokenizer: Any, tools: Sequence[Tool | Mapping[str, Any]] = ()) -> None:
        if getattr(tokenizer, "response_template", None) is None:
            raise ValueError(
                "with_tools: the tokenizer has no response_template; leave out `parse` for <tool_call> JSON"
            )
        user = [{"role": "user", "content": ""}]
        self._start = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
        self._tokenizer, self._tools = tokenizer, list(tools) or None

    def __call__(self, text: str) -> list[Call]:
        try:
            return [_checked(call.get("function", call)) for call in self._message(text).get("tool_calls") or ()]
        except (ValueError, TypeError, AttributeError, RecursionError):
            return []

    def content(self, text: str) -> str:
        """Return the text without thoughts and calls."""
        return str(self._message(text).get("content") or "")

    def _message(self, text: str) -> dict[str, Any]:
        return self._tokenizer.parse_response(text, prefix=self._start, tools=self._tools) or {}


parser_of = ResponseParser


def message_of(text: str, parse: Parser) -> Message | None:
    """Return the assistant's turn as a message with `tool_calls`, or None without calls."""
    whole = getattr(text, "whole", text)
    calls = _calls_in(whole, parse)
    if not calls:
        return None
    content = text
    if isinstance(parse, ResponseParser):
        content = parse.content(whole)
    elif parse is parse_tool_calls:
        for inner in _between(text, _OPEN, _CLOSE):
            content = content.replace(f"{_OPEN}{inner}{_CLOSE}", "", 1)
    functions = [{"name": _plain(name), "arguments": _plain(arguments)} for name, arguments in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content.strip(), "tool_calls": tool_calls}


def _calls_in(text: str, parse: Parser) -> list[Call]:
    """Return the calls that a parser finds; none where it breaks on the policy's text."""
    try:
        return [(str(name), {} if arguments is None else arguments) for name, arguments in parse(text) or ()]
    except Exception as error:
        if is_unavailable(error):
            raise
        warn_from_thread(f"parse: {describe_error(error)}; a text that it cannot read has no tool calls")
        return []


def action_of(calls: Sequence[Call]) -> str:
    """Return calls as one text, the same for equal calls."""
    return json.dumps(calls, sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value as JSON that any client, template and file takes, whatever a parser read in the policy's text."""
    try:
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
        return value
    except (TypeError, ValueError, RecursionError):  # a set, keys of several types, half a surrogate pair, a cycle
        pass
    try:
        text = json.dumps(value, default=str, skipkeys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = json.dumps(repr(value), ensure_ascii=False)
    return json.loads(text.encode(errors="replace"))


def _checked(call: Any) -> Call:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a tool call must be an object with a name")
    arguments = call.get("arguments")
    return call["name"], {} if arguments is None else arguments


class _Kit:
    """Tools of an environment's rollouts. Probes one instance, as TRL does."""

    def __init__(self, name: str | None, tools: Sequence[Tool], factory: Factory) -> None:
        self.tools, self.factory = list(tools), factory
        self.chosen = name is not None
        """Whether the column `environment` chose the environment; then it is not passed to `reset`."""
        probe = factory()
        if inspect.isawaitable(probe):
            probe = shared_calls().awaited(probe).result()
        if probe is not None and not callable(getattr(probe, "reset", None)):
            raise ValueError(f"environment_factory: {type(probe).__name__} must have a method reset(**row)")
        self.schemas = [_schema(tool) for tool in self.all_tools(probe)]
        self.names = names = [schema["function"]["name"] for schema in self.schemas]
        if doubled := {n for n in names if names.count(n) > 1}:
            raise ValueError(f"with_tools: several tools are called {', '.join(sorted(doubled))}; rename them")
        if not self.schemas:
            raise ValueError(f"with_tools: no tools{f' for environment {name!r}' if name else ''}; give some")
        self.rewards = callable(getattr(probe, "get_reward", None))
        self.label = f"{name}: {type(probe).__name__}"

    def all_tools(self, environment: Any) -> Iterator[Tool]:
        yield from self.tools
        for name, member in inspect.getmembers(type(environment)):  # of the class: an instance would run its properties
            method = inspect.isfunction(member) or inspect.ismethod(member)  # static ones are functions
            if method and name not in ("reset", "get_reward") and not name.startswith("_"):
                yield getattr(environment, name)


def _schema(tool: Tool) -> dict[str, Any]:
    name = getattr(tool, "__name__", repr(tool))
    remedy = "it needs type hints and a Google-style docstring that describes every argument"
    if not callable(tool):
        remedy = "give a function, or a method of a class or an object: Shop.look, shop.take"
    elif isinstance(tool, partial):
        remedy = "give it name and docstring of its function: functools.update_wrapper(tool, tool.func)"
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # transformers' own exceptions
        raise ValueError(f"tool {name}: {error} ({remedy})") from None
    if next(iter(inspect.signature(tool).parameters), "") == "self":
        raise ValueError(f"tool {name}: it is a method without its object; give the object's, e.g. shop.{name}")
    return schema


class ToolTask:
    """A task of one turn with tools that the model may call, over several turns.

    `environment_factory`: makes an environment for each rollout; a mapping gives one for each value of the column
    `environment`. Its `get_reward` is called after every turn and at the end, and is the reward. `parse`: finds
    calls in the model's output. `timeout_s` bounds a reset, and all calls of a turn; later the rollout fails. Raises
    ValueError when the task has its own turns or prompts other than messages, or a tool cannot be described.
    """

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool] = (),
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        *,
        parse: Parser = parse_tool_calls,
        max_tool_calling_iterations: int = MAX_ITERATIONS,
        timeout_s: float = 60.0,
    ) -> None:
        if task.max_turns != 1:
            raise ValueError(f"with_tools: task {task.name} has an environment of its own; give a task of one turn")
        if max_tool_calling_iterations < 1:
            raise ValueError(f"max_tool_calling_iterations must be at least 1, not {max_tool_calling_iterations}")
        factories: Mapping[Any, Factory] = {None: lambda: None}
        if isinstance(environment_factory, Mapping):
            factories = environment_factory
        elif environment_factory is not None:
            factories = {None: environment_factory}
        self._kits = {name: _Kit(name, tools, factory) for name, factory in factories.items()}
        rewards = [kit.rewards for kit in self._kits.values()]
        if task.reward_funcs and any(rewards):
            raise ValueError(
                f"with_tools: get_reward of the environment would replace the reward functions of task {task.name}; "
                "keep one of the two"
            )
        self.name, self.stop = task.name, task.stop
        self.reward_funcs: Sequence[RewardFn] = task.reward_funcs
        self.max_turns = max_tool_calling_iterations + 1
        self._task, self._parse, self._deadlines = task, parse, Deadlines(timeout_s, overlapping=True)
        self.unshown_columns: Mapping[str, str] = {} if environment_factory else getattr(task, "unshown_columns", {})
        """See `DatasetTask`; an environment's `reset` gets all columns."""
        self.rewards_itself = all(rewards)
        """Whether every environment has `get_reward`, so that no reward function is asked."""
        self.needs_reward_funcs = not all(rewards)
        for prompt in chain(task.train, task.test):
            self._equipped(prompt)
        self.train = changed(task.train, self._equipped)
        self.test = changed(task.test, self._equipped)

    def make_env(self, prompt: Prompt) -> OverlappingEnv:
        return ToolEnv(self._kit(prompt), prompt, self._parse, self.max_turns, self._deadlines)

    def fingerprint(self) -> str:
        kits = [[kit.label, kit.schemas] for kit in self._kits.values()]
        return digest([self._task.fingerprint(), kits, self.max_turns])

    def _kit(self, prompt: Prompt) -> _Kit:
        name = None if None in self._kits else prompt.columns.get("environment")
        if name not in self._kits:
            known = ", ".join(map(repr, self._kits))
            raise ValueError(f"prompt '{prompt.id}': environment {name!r} is none of {known}")
        return self._kits[name]

    def _equipped(self, prompt: Prompt) -> Prompt:
        if not prompt.messages:
            raise ValueError(f"prompt '{prompt.id}' is plain text; tools need messages and a chat model")
        if "tools" in prompt.template_values:
            raise ValueError(
                f"prompt '{prompt.id}': column 'tools' offers tools that with_tools cannot run; "
                "remove or rename the column"
            )
        return replace(prompt, tools=tuple(self._kit(prompt).schemas))


with_tools = ToolTask


def _content(finish: str | Callable[[], Any]) -> str | list[Any]:
    """Return the result of a call as a message's content: a list of parts, as in TRL, or text.

    `finish` may be the text of an error.
    """
    result = finish() if callable(finish) else finish
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise ToolUnavailableError("a tool yields its result in parts; it must return the whole")
    if isinstance(result, list) and result and all(isinstance(part, dict) and "type" in part for part in result):
        return list(private(result))
    return str(result).encode("utf-8", "replace").decode()  # the policy may have written half a character


class ToolEnv:
    """Implements `OverlappingEnv`. Tools run in this process under a deadline."""

    def __init__(self, kit: _Kit, prompt: Prompt, parse: Parser, max_turns: int, deadlines: Deadlines) -> None:
        self.environment: Any = None
        """The user's environment."""
        self._kit, self._prompt, self._parse = kit, prompt, parse
        self._turns_left = max_turns
        self._deadlines = deadlines
        self._tools: dict[str, Tool] = {}

    @property
    def winnow_report(self) -> EnvReport:
        return EnvReport(environment=self.environment)

    def start_reset(self) -> Future[str | None]:
        return self._deadlines.submit(self._reset)

    def start_step(self, text: str) -> Future[StepResult]:
        return self._deadlines.submit(partial(self._step, text))

    def start_reward(self) -> Future[float | None]:
        return self._deadlines.submit(self._reward)

    def _reset(self) -> str | None:
        self.environment = self._begin(self._kit.factory, {})()
        self._tools = dict(zip(self._kit.names, self._kit.all_tools(self.environment), strict=True))
        if self.environment is None:
            return None
        row = {"prompt": [dict(m) for m in self._prompt.messages or ()], **self._prompt.columns}
        if self._kit.chosen:
            del row["environment"]
        observation: str | None = self._begin(self.environment.reset, row)()
        return observation

    def _step(self, text: str) -> StepResult:
        message = message_of(text, self._parse)
        self._turns_left -= 1
        if message is None or not self._turns_left:
            return StepResult(None, self._reward(), done=message is None, message=message)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        begun = [(name, self._tried(partial(self._call, name, arguments))) for name, arguments in calls]
        messages: list[Message] = []
        for name, finish in begun:
            content = self._tried(partial(_content, finish))
            messages.append({"role": "tool", "name": name, "content": content})
        return StepResult(NextMessages(messages), self._reward(), action=action_of(calls), message=message)

    def _call(self, name: str, arguments: Any) -> Callable[[], Any]:
        if name not in self._tools:
            raise ValueError(f"Tool {name} not found.")
        return self._begin(self._tools[name], private(arguments))

    def _begin(self, function: Tool, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Start a call and return a function that returns its result. Awaitables are awaited concurrently."""
        attempts: list[bool] = []
        try:
            with noticing_signals(lambda: attempts.append(True)):
                result = function(**arguments)
        except Exception as error:
            if attempts:
                raise ToolUnavailableError(f"tool {function_name(function)}: {error}; {NO_SIGNALS}") from error
            raise
        if attempts:
            warn_from_thread(f"tool {function_name(function)}: {NO_SIGNALS}")
        if inspect.isawaitable(result):
            result = self._deadlines.awaited(result)
        return result.result if isinstance(result, Future) else lambda: result

    def _tried(self, step: Callable[[], Any]) -> Any:
        """Return the result, or an error for the model if it may have caused it, as in TRL."""
        try:
            return step()
        except SystemExit as error:  # argparse refuses its arguments like this
            return str({"error": f"raised SystemExit: {error}"})
        except Exception as error:
            if is_unavailable(error):
                raise
            if isinstance(error, sqlite3.ProgrammingError) and "same thread" in str(error):
                raise ToolUnavailableError(f"{error}; open it with check_same_thread=False") from error
            return str({"error": str(error)})

    def _reward(self) -> float | None:
        get_reward = getattr(self.environment, "get_reward", None)
        return None if get_reward is None else self._begin(get_reward, {})()
