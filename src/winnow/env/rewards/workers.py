"""Worker processes of reward functions given by name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...base.sanitize import redact
from ..workers.bwrap_worker import Cage
from ..workers.worker import WorkerPool, worker_environment

MAX_PRINTED = 300
"""Characters kept of a line that a function printed."""


@dataclass(frozen=True)
class RewardWorkers:
    """Limits and visible environment of reward workers."""

    size: int = 2
    memory_mb: int = 2_048
    """Megabytes of data of one process (Linux)."""
    env: tuple[str, ...] = ()
    """Visible environment variables, such as the key of a judge; of all others only harmless ones."""
    sandbox: Literal["bwrap"] | None = None
    """`bwrap`: run in bubblewrap, without network; see `Cage`."""

    def pool(self, specs: Sequence[Any], timeout_s: float) -> WorkerPool:
        """Return the pool. Raises ValueError naming a variable that is not set, SandboxError without bubblewrap."""
        if missing := [name for name in self.env if name not in os.environ]:
            raise ValueError(f"reward_env: not set in the environment: {', '.join(missing)}")
        files = [spec.rpartition(":")[0] for spec in specs if isinstance(spec, str) and ".py:" in spec]
        shown = [os.path.dirname(os.path.abspath(os.path.expanduser(file))) for file in files]
        cage = Cage(shown) if self.sandbox else None
        return WorkerPool(self.size, timeout_s, memory_mb=self.memory_mb, env=self.env, cage=cage)

    def printed(self, pool: WorkerPool, target: str | None) -> str:
        """Return the last line that a function of the pool printed, and the variables hidden from it that it missed."""
        if target is None:
            return ""
        *_, last = pool.printed.get(target, "").splitlines() or [""]
        cause = f"it printed: {last[:MAX_PRINTED]}" if last else ""
        return redact(self.with_hidden(cause, pool.unset.get(target, ())), self.env)

    def with_hidden(self, cause: str, missed: Iterable[str] = ()) -> str:
        """Return the cause of a failure, with the remedy if it names a variable set here and hidden from workers.

        Recognizes `KeyError: 'KEY'` and the wording of judge clients. `missed`: variables that the worker missed.
        """
        seen = worker_environment().keys() | set(self.env)
        named = [*re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", cause), *re.findall(r"KeyError: '(\w+)'", cause)]
        hidden = [name for name in dict.fromkeys([*named, *missed]) if name in os.environ and name not in seen]
        if not hidden:
            return cause
        return (
            f"{cause}{'; ' if cause else ''}{', '.join(hidden)} is set here, but reward functions given by name do not "
            f"see it: add reward_env: [{', '.join((*self.env, *hidden))}]"
        )
