"""Seconds by what they were spent on: parts of a step in the engine, the rollout runner and the learner, and of a run.

A GPU computes after the call that asks for it has returned. These are seconds of the host, so there the wait for the
GPU is part of whatever first needs its results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

DECODE_ROWS = {8: "decode_1-8", 32: "decode_9-32", 128: "decode_33-128"}
"""Names of the seconds of decoding steps, by the largest number of rows."""
DECODE_MORE = "decode_over_128"
ENGINE_SECONDS = ("prefill", *DECODE_ROWS.values(), DECODE_MORE, "drafts", "copying", "sampling")
"""What an engine spends its seconds on."""


def now() -> float:
    """Return the time of a monotonic clock, in seconds. Tests replace it."""
    return time.monotonic()


class Seconds:
    """Sums of seconds by name. `names` are always present, with 0 where nothing was spent."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.by_name = dict.fromkeys(names, 0.0)
        self._last = self._inner = 0.0

    def begin(self) -> float:
        """Start the first of several laps; return the time."""
        self._last = now()
        return self._last

    def lap(self, name: str) -> float:
        """Add the time since the last lap to `name`; return the time."""
        last, self._last = self._last, now()
        self.by_name[name] += self._last - last
        return self._last

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, without that of phases within it."""
        outer, self._inner = self._inner, 0.0
        started = now()
        try:
            yield
        finally:
            took = now() - started
            self.add({name: took - self._inner})
            self._inner = outer + took

    def add(self, seconds: Mapping[str, float], prefix: str = "") -> None:
        for name, value in seconds.items():
            self.by_name[prefix + name] = self.by_name.get(prefix + name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Return the sums since the last call."""
        taken, self.by_name = self.by_name, dict.fromkeys(self._names, 0.0)
        return taken


class RunClock(Seconds):
    """Seconds of a run. Names with a slash (`generate/prefill`) are parts of the phase before it."""

    def __init__(self) -> None:
        super().__init__()
        self.started_at(now())

    def started_at(self, begun_at: float, before: float = 0.0) -> None:
        """Count from a time; `before`: seconds of the run before it was resumed."""
        self._begun_at, self._before = begun_at, before

    @contextmanager
    def phase_of_parts(self, name: str, spent: Callable[[], Mapping[str, float]]) -> Iterator[None]:
        """Measure a phase; `spent()` returns its parts, and those of what came before, since the last call."""
        spent()
        with self.phase(name):
            yield
        self.add(spent(), f"{name}/")

    def total(self) -> float:
        """Return the seconds of the run so far."""
        return self._before + now() - self._begun_at

    def metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return seconds of a step, and of the run so far, as metrics."""
        return {f"seconds/{name}": value for name, value in seconds.items()} | {"seconds_total": self.total()}

    def rest(self, name: str) -> None:
        """Add the time since the start that belongs to no phase to `name`."""
        phases = sum(seconds for phase, seconds in self.by_name.items() if "/" not in phase)
        self.add({name: now() - self._begun_at - phases})
