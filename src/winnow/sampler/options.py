"""Options of samplers in other processes, of whatever kind."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ConfigError


@dataclass(frozen=True)
class PoolOptions:
    """Options that all kinds of samplers elsewhere have in common."""

    samplers: int = 1
    threads: int = 1
    """Threads of each sampler, for matrix products."""
    timeout_s: float = 300.0
    """Silence after which a sampler is taken for stuck."""
    max_restarts: int = 3
    """Deaths of a sampler without a finished group in between, after which the run stops."""

    def __post_init__(self) -> None:
        if self.samplers < 1 or self.threads < 1 or self.max_restarts < 1:
            raise ValueError("samplers, threads and max_restarts must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, not {self.timeout_s}")

    @property
    def least(self) -> int:
        """Samplers that must have a place before work begins."""
        return self.samplers

    def device_of(self, slot: int, device: str) -> str | None:
        """Device of a sampler, where the run's is `device`; None is the same."""
        return None

    def check(self, reward_timeout_s: float) -> None:
        """Raises ConfigError when a sampler that waits for a reward would be taken for stuck."""
        if self.timeout_s <= reward_timeout_s:
            raise ConfigError(
                f"sync: timeout_s={self.timeout_s:g} must be above reward_timeout_s={reward_timeout_s:g}, or a "
                "sampler that waits for a reward is taken for stuck"
            )
