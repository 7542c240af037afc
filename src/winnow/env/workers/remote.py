"""Environments in a few worker processes, stepped under a deadline while the engine continues.

An environment stays in one process from reset to end. A process that crashes or exceeds its deadline is killed and
replaced. Its environments are lost, and each of their pending answers becomes an EnvLostError, which fails the rollout.
Nothing is retried: a step may have had its effect.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..base import Env, ModelTurn, StepResult
from .calls import converted
from .functions import awaited, load_function
from .worker import WorkerError, WorkerPool


class EnvLostError(RuntimeError):
    """The environment's process crashed, was killed at its deadline, or was closed."""


class EnvPool:
    """`size` processes, started on first use and restarted after a crash. Thread-safe.

    `timeout_s` bounds one reset or step, without the import of the environment's factory. `independent`: the engine
    waits for all answers in order, so that runs repeat bit for bit (see `OverlappingEnv`). Only for short steps
    of environments that share no locks, sessions or places.
    """

    def __init__(self, size: int = 2, timeout_s: float = 60.0, *, independent: bool = False) -> None:
        if size < 1:
            raise ValueError(f"EnvPool: size must be at least 1, not {size}")
        self.independent = independent
        self._homes = [_Home(WorkerPool(1, timeout_s)) for _ in range(size)]
        self._serial = itertools.count()
        weakref.finalize(self, _close, self._homes).atexit = False  # then they end by themselves

    def make(self, target: str, kwargs: Mapping[str, Any]) -> RemoteEnv:
        """Return an environment made in the least busy process by `target`, `module:function`, from JSON `kwargs`."""
        home = min(self._homes, key=lambda h: len(h.living))
        return RemoteEnv(self, home, next(self._serial), target, dict(kwargs))

    def close(self) -> None:
        """Kill all processes. Safe to call twice; without it, they end with the pool and its environments."""
        _close(self._homes)


class _Home:
    """A worker process and its environments."""

    def __init__(self, workers: WorkerPool) -> None:
        self.workers = workers
        self.living: set[int] = set()
        self.last_words = "it died between two calls"
        """Cause of the process's last loss."""


def _close(homes: list[_Home]) -> None:
    for home in homes:
        home.workers.close()


class RemoteEnv:
    """Implements `OverlappingEnv`. `close` frees its memory in the process."""

    def __init__(self, pool: EnvPool, home: _Home, serial: int, target: str, kwargs: dict[str, Any]) -> None:
        self.independent = pool.independent
        self._pool = pool  # its processes end with the last of its environments
        self._home, self._serial = home, serial
        self._target, self._kwargs = target, kwargs

    def start_reset(self) -> Future[str | None]:
        self._home.living.add(self._serial)
        answer = self._call("host_reset", self._target, target=self._target, kwargs=self._kwargs)
        return converted(answer, lambda observation: observation, self._as_lost)

    def start_step(self, text: str) -> Future[StepResult]:
        turn = vars(text) if isinstance(text, ModelTurn) else {}
        answer = self._call("host_step", text=text, turn=turn)
        return converted(answer, lambda values: StepResult(**values), self._as_lost)

    def close(self) -> None:
        """Close without waiting. Pending answers come first."""
        if self._serial in self._home.living:
            self._home.living.discard(self._serial)
            with suppress(RuntimeError):  # the pool is closed: nothing is held
                self._call("host_close")

    def _call(self, function: str, called: str = "", **arguments: Any) -> Future[Any]:
        arguments["serial"] = self._serial
        return self._home.workers.call(f"{__name__}:{function}", arguments, called=called)

    def _as_lost(self, error: BaseException) -> BaseException:
        """Return the error raised by the environment, or the cause of its loss."""
        if not isinstance(error, WorkerError):
            return error
        detail = error.detail
        if error.kind != "raised":
            self._home.last_words = detail
            return EnvLostError(f"its worker process was lost: {detail}")
        if detail.startswith(f"{NotHostedError.__name__}:"):
            return EnvLostError(f"its worker process was lost with all it held: {self._home.last_words}")
        return WorkerError("raised", detail)


# ---------------------------------------------------------------- the worker's side


class NotHostedError(LookupError):
    """The process is younger than the environment and does not know it."""


_hosted: dict[int, Env] = {}


def host_reset(serial: int, target: str, kwargs: dict[str, Any]) -> str | None:
    env = _hosted[serial] = awaited(load_function(target)(**kwargs))
    observation: str | None = awaited(env.reset())
    return observation


def host_step(serial: int, text: str, turn: dict[str, Any]) -> dict[str, Any]:
    if serial not in _hosted:
        raise NotHostedError(f"environment {serial}")
    result = awaited(_hosted[serial].step(ModelTurn(text, **turn) if turn else text))
    if not isinstance(result, StepResult):
        raise TypeError(f"step() must return a StepResult, not {type(result).__name__}")
    reward = result.reward
    if isinstance(reward, Mapping):
        reward = {agent: float(value) for agent, value in reward.items()}
    info = {"progress": result.info["progress"]} if "progress" in result.info else {}  # the rest need not be JSON
    return {
        "observation": result.observation,
        "reward": reward if isinstance(reward, Mapping | None) else float(reward),
        "done": bool(result.done),
        "info": info,
        "action": result.action,
        "message": result.message,
    }


def host_close(serial: int) -> None:
    env = _hosted.pop(serial, None)
    if env is not None and hasattr(env, "close"):
        awaited(env.close())
