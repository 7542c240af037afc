"""Environments of the package verifiers: a rollout is one of its episodes, with the policy at its own address."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from ...base.files import digest
from ...base.machine import install
from ...env.base import OneTurn, RewardFn, Task
from ...env.workers.calls import loop_in_thread
from ...types import Message, Prompt
from .task import AgentTask

NO_KEY = "WINNOW_ENDPOINT_KEY"
"""Environment variable for a key, which the address makes needless; verifiers sends `EMPTY` if it is unset."""

END_S = 10.0
"""Seconds that the environment's servers may take to end."""


@dataclass(frozen=True)
class VerifiersConfig:
    """Tasks, harness and rewards of a `verifiers` environment with one agent (its version 0.4, `verifiers.v1`)."""

    config: dict[str, Any]
    """The environment in verifiers' configuration: `taskset: {id: my-taskset}`, `agent: {harness: {id: ...}}`, ..."""
    test_size: int | float = 0
    """Hold out this many tasks (a share if below 1), chosen by a hash of their content."""
    max_turns: int = 16
    """Answered requests of an episode."""
    max_turn_length: int | None = None
    """Tokens of one answer; None: the rest of `max_completion_length`."""
    timeout_s: float = 300.0
    """Seconds that an episode may take between an answer and its next request, or its end with its rewards."""
    seed: int = field(default=0, repr=False)
    """Seed of the choice of held-out tasks."""

    def __post_init__(self) -> None:
        if self.test_size < 0 or (self.test_size >= 1 and self.test_size != int(self.test_size)):
            raise ValueError(f"verifiers: test_size must be a share below 1 or a whole number, got {self.test_size}")

    def build(self) -> AgentTask:
        """Return the task. Raises ValueError if verifiers refuses it, has several agents, or has no end."""
        try:
            import verifiers.v1 as vf
        except ImportError as error:
            raise ValueError(f"env: verifiers 0.4 is not installed ({error}): {install('verifiers')}") from None
        try:
            env = vf.load_environment(vf.resolve_env_config(self.config))
        except (ModuleNotFoundError, TypeError, ValueError) as error:
            raise ValueError(f"verifiers: {error}") from None
        roles = [name for name, role in env.config if isinstance(role, vf.AgentConfig)]
        if len(roles) != 1:
            raise ValueError(f"verifiers: agents {', '.join(roles)}: a rollout is the conversation of one; give such")
        if not env.taskset.bounded:
            raise ValueError(f"verifiers: taskset {env.config.taskset.id} has no end; give it one, e.g. by its options")
        tasks = {task.key: task for task in env.taskset}
        rows: Task = Tasks(self, [prompt_of(key, task.data) for key, task in tasks.items()])
        episodes = Episodes(env)

        def episode(key: str, base_url: str, model: str) -> float:
            return episodes.run(tasks[key], base_url, model)

        return AgentTask(
            rows,
            episode,
            max_turns=self.max_turns,
            max_turn_length=self.max_turn_length,
            timeout_s=self.timeout_s,
        )


def prompt_of(key: str, data: Any) -> Prompt:
    """Return the data of a task known before its harness asks; its request is the prompt."""
    messages: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, list):
        messages += [{"role": m.role, "content": str(getattr(m, "content", "") or "")} for m in data.prompt]
    else:
        messages.append({"role": "user", "content": data.prompt or ""})
    return Prompt(data.id or data.name or key[:16], 0, messages=tuple(messages), columns={"key": key})


class Tasks(OneTurn):
    """The tasks as rows, split into training and held-out ones."""

    name = "verifiers"
    reward_funcs: Sequence[RewardFn] = ()
    rewards_itself = True

    def __init__(self, config: VerifiersConfig, prompts: Sequence[Prompt]) -> None:
        self.config = config
        keys = [str(prompt.columns["key"]) for prompt in prompts]
        held = int(config.test_size if config.test_size >= 1 else config.test_size * len(keys))
        fewest = 1 if config.test_size else 0
        if not fewest <= held < len(keys):
            raise ValueError(
                f"verifiers: test_size {config.test_size} would hold out {held} of {len(keys)} tasks; leave some on "
                "each side"
            )
        chosen = set(sorted(keys, key=lambda key: hashlib.sha256(f"{config.seed} {key}".encode()).digest())[:held])
        names = Counter(p.id for p in prompts)
        train: list[Prompt] = []
        test: list[Prompt] = []
        for prompt, key in zip(prompts, keys, strict=True):
            part = test if key in chosen else train
            name = prompt.id if names[prompt.id] == 1 else key[:16]
            part.append(replace(prompt, id=name, ordinal=len(part)))
        self.train: Sequence[Prompt] = train
        self.test: Sequence[Prompt] = test

    def fingerprint(self) -> str:
        rows = [[p.columns["key"] for p in part] for part in (self.train, self.test)]
        return digest([self.config.config, rows])


class Episodes:
    """Concurrent episodes of an environment on an event loop, sharing its servers (tools, interception)."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, task: Any, base_url: str, model: str) -> float:
        """Return the reward. Raises RuntimeError with the cause when the episode failed."""
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        context = vf.ModelContext(model=model, client=client)
        episode = asyncio.run_coroutine_threadsafe(self._env.run_episode(task, context), self._started()).result()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            causes = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given"
            raise RuntimeError(f"the episode failed: {causes}")
        return float(episode.traces[-1].reward)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop, stop = loop_in_thread("winnow-verifiers"), asyncio.Event()
                ready: Future[None] = Future()
                serving = asyncio.run_coroutine_threadsafe(_serve(self._env, ready, stop), loop)
                try:
                    ready.result()
                except BaseException:
                    loop.call_soon_threadsafe(loop.stop)
                    raise
                self._loop = loop
                weakref.finalize(self, _end, loop, stop, serving)
            return self._loop


def _end(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, serving: Future[None]) -> None:
    """Have the servers end, for which they get a while, then the loop."""
    serving.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    loop.call_soon_threadsafe(stop.set)
    if asyncio._get_running_loop() is not loop:  # where the garbage collector may call this
        wait([serving], timeout=END_S)


async def _serve(env: Any, ready: Future[None], stop: asyncio.Event) -> None:
    """Run all servers until `stop` is set; complete `ready` once they are up."""
    try:
        async with env.serving():
            ready.set_result(None)
            await stop.wait()
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)
