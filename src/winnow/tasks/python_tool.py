"""Tool-integrated reasoning: questions of a data set, answered with the help of Python in a sandbox.

The model writes a fenced block of Python. The block runs, and its output is the next observation. Up to `max_calls`
blocks run; a turn without one ends the rollout, unless the fence of another block ended the turn. The reward functions
then score the completion, as for a data set without the tool. Blocks share no variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from ..base.files import digest
from ..config.options import CHECKED
from ..env.base import OverlappingEnv, RewardFn, StepResult
from ..env.chat import is_begun, with_text
from ..env.dataset import DatasetConfig, DatasetTask
from ..env.prompt_store import changed
from ..env.workers.calls import converted
from ..env.workers.sandbox import Outcome, Sandbox, SandboxOptions
from ..types import Prompt

INSTRUCTION = (
    "\nYou may run Python: write a block between ```python and ```, and you are shown what it prints. Every block runs "
    "on its own, so define again what you need, and print what you want to see."
)
_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_FENCE_END = "\n```\n"
_NOT_RUN = "```output\n(not run: only ```python blocks are)\n```\n"


@dataclass(frozen=True, config=CHECKED)
class PythonToolConfig(DatasetConfig):
    """A data set (all of its options) whose questions may be answered with Python in a sandbox."""

    max_calls: PositiveInt = 4
    """Blocks that are run; the turn after the last one is the answer."""
    instruction: str = INSTRUCTION
    """Appended to every question; it should mention the tool."""
    max_observation: PositiveInt = 2_000
    """Characters of a program's output shown to the model; longer output loses its middle."""
    timeout_s: float = 10.0
    memory_mb: int = 256
    slots: int = 2
    """Concurrent programs."""
    python: str = SandboxOptions.python
    """Interpreter in the sandbox, with the packages that programs may import."""
    unsafe: bool = False
    """Run programs without a sandbox. Only where the machine itself is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sandbox()

    def sandbox(self) -> SandboxOptions:
        return SandboxOptions(self.timeout_s, self.memory_mb, slots=self.slots, python=self.python, unsafe=self.unsafe)

    def build(self) -> PythonTool:  # type: ignore[override]
        return PythonTool(super().build(), self)


class PythonTool:
    """Task with Python in a sandbox. Raises SandboxError when this machine cannot contain programs."""

    name = "python_tool"
    stop = (_FENCE_END,)
    needs_reward_funcs = True

    def __init__(self, task: DatasetTask, config: PythonToolConfig) -> None:
        self.config = config
        self.max_turns = config.max_calls + 1
        self.reward_funcs: list[RewardFn] = task.reward_funcs
        self._sandbox = Sandbox(config.sandbox())
        self._task = task
        self.unshown_columns = task.unshown_columns
        self.train = changed(task.train, partial(_instructed, instruction=config.instruction))
        self.test = changed(task.test, partial(_instructed, instruction=config.instruction))

    def make_env(self, prompt: Prompt) -> OverlappingEnv:
        return PythonToolEnv(self._sandbox.start, self.config.max_calls, self.config.max_observation)

    def fingerprint(self) -> str:
        own = {k: v for k, v in asdict(self.config).items() if k in ("max_calls", "instruction", "max_observation")}
        own |= {"timeout_s": self.config.timeout_s, "memory_mb": self.config.memory_mb, "python": self.config.python}
        return digest([self._task.fingerprint(), own])


class PythonToolEnv:
    """Implements `OverlappingEnv`. Gives no reward: the reward functions do."""

    def __init__(self, start: Callable[[str], Future[Outcome]], max_calls: int, max_observation: int) -> None:
        self._start, self._left, self._most = start, max_calls, max_observation
        self._running: Future[Outcome] | None = None

    def start_reset(self) -> Future[str | None]:
        return _done(None)

    def start_step(self, text: str) -> Future[StepResult]:
        """Run the last block of a turn, if calls are left. A failure of the sandbox is an exception."""
        blocks = _BLOCK.findall(text)
        ended = not blocks and getattr(text, "stop_string", "") != _FENCE_END  # which cuts the turn at any block
        if ended or not self._left:
            return _done(StepResult(None, done=ended))
        self._left -= 1
        if not blocks:
            return _done(StepResult(_NOT_RUN))
        code = blocks[-1]
        self._running = self._start(code)
        return converted(self._running, partial(self._result, code))

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def _result(self, code: str, outcome: Outcome) -> StepResult:
        return StepResult(self._shown(outcome), action=code)

    def _shown(self, outcome: Outcome) -> str:
        text = outcome.stdout
        if outcome.exit_code and outcome.stderr.strip():
            text += outcome.stderr
        if outcome.timed_out:
            text += "\n(stopped: it took too long)"
        if outcome.truncated:
            text += "\n(stopped: it printed too much)"
        text = text.replace("```", "'''").strip("\n")  # a program must not close the fence it is shown in
        if len(text) > self._most:
            half = self._most // 2
            text = f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
        return f"```output\n{text or '(it printed nothing)'}\n```\n"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _instructed(prompt: Prompt, instruction: str) -> Prompt:
    """Return the prompt with the instruction behind its last message, or behind the one before a begun turn."""
    if prompt.messages is None:
        return replace(prompt, text=f"{prompt.text}{instruction}")
    messages = list(prompt.messages)
    begun = [messages.pop()] if len(messages) > 1 and is_begun(messages) else []
    messages[-1] = with_text(messages[-1], instruction)
    return replace(prompt, messages=(*messages, *begun))
