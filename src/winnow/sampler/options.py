"""Options shared by all samplers in other processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolOptions:
    """Base class of the options of samplers in other processes."""

    samplers: int = 1
    threads: int = 1
    """Threads of each sampler, for matrix products."""
    timeout_s: float = 300.0
    """Silence after which a sampler counts as stuck."""
    max_restarts: int = 3
    """Restarts in a row of a sampler, without a finished group in between; the next failure stops the run."""

    def __post_init__(self) -> None:
        if self.samplers < 1 or self.threads < 1 or self.max_restarts < 1:
            raise ValueError("samplers, threads and max_restarts must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: must be above 0, not {self.timeout_s}")

    @property
    def least(self) -> int:
        """Samplers that must be scheduled before work begins."""
        return self.samplers

    def device_of(self, slot: int, device: str) -> str | None:
        """Return the device of a sampler in a run on `device`; None: the same."""
        return None
