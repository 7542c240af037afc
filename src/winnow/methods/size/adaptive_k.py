"""More siblings once too many groups teach nothing: more rollouts may break a tie among few.

Beyond the paper: with `tau_down` the size may also go back, with hysteresis. Larger groups lower the zero-variance
share by themselves, so the two thresholds must lie apart and a size must be kept for a while (`dwell`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from ...base.state import Count, State
from ...config.options import CHECKED
from ...types import Prompt
from ..base import refuse_unused
from .base import GroupSize

ROUNDING = 1e-9
"""Tolerance of a mean of shares: five shares with mean 1/2 may add up to more than 5/2 in floating point."""


@dataclass(frozen=True, config=CHECKED)
class AdaptiveK:
    """Raise the group size from `base` to `high` when the share of zero-variance groups is high (Active-RLOO, eq. 5).

    `base` None: `num_generations`; `high` None: twice `num_generations`. The share is averaged over the last `window`
    steps and compared with `tau`. `tau_down` None: one way, as in the paper. Otherwise the size returns to `base` below
    `tau_down`, using only the steps since the last change. No change comes within `dwell` steps of another.
    """

    base: Annotated[int, Field(ge=2)] | None = None
    high: int | None = None
    tau: Annotated[float, Field(ge=0, lt=1)] = 0.5
    window: PositiveInt = 5
    tau_down: float | None = None
    dwell: PositiveInt = 10

    def __post_init__(self) -> None:
        if self.tau_down is None:
            refuse_unused(self, ["dwell"], "without tau_down; remove it, or set tau_down below tau")
        if self.tau_down is not None and not 0 < self.tau_down < self.tau:
            raise ValueError(
                f"tau_down must lie between 0 and tau={self.tau}, not {self.tau_down}: the size goes down below it"
            )

    def build(self, num_generations: int) -> AdaptiveSize:
        """Build the controller. Raises ValueError unless base < high."""
        base = num_generations if self.base is None else self.base
        high = 2 * num_generations if self.high is None else self.high
        if not base < high:
            raise ValueError(
                f"base={base} must be below high={high} "
                f"(their defaults are num_generations={num_generations} and twice that)"
            )
        return AdaptiveSize(self, base, high)


class AdaptiveState(State):
    size: Count
    history: list[float]
    steps: Count | None


class AdaptiveSize(GroupSize):
    """Controller of the size; its state is the size, the shares since the last change, and the steps since then."""

    state_model = AdaptiveState

    def __init__(self, options: AdaptiveK, base: int, high: int) -> None:
        self.options = options
        self.smallest, self.largest = base, high
        self.size = base
        self.history: list[float] = []
        self.steps: int | None = None
        """Steps since the last change; None before the first, which `dwell` does not delay."""

    def size_for(self, prompt: Prompt) -> int:
        return self.size

    def observe_step(self, metrics: Mapping[str, float]) -> None:
        """Learn from `frac_reward_zero_std`; a step without it, or without rollouts, only passes time."""
        o = self.options
        if self.steps is not None:
            self.steps += 1
        if "frac_reward_zero_std" in metrics and metrics.get("groups/rolled_out") != 0:
            self.history = [*self.history, float(metrics["frac_reward_zero_std"])][-o.window :]
        size = self._next_size()
        if size != self.size and (self.steps is None or self.steps >= o.dwell):
            self.size, self.history, self.steps = size, [], 0

    def _next_size(self) -> int:
        """Return the size by the mean of the last `window` shares; before that many it stays.

        Source: Active-RLOO (Liu), equation 5: K_base = 4, K_high = 8, tau = 0.5, W = 5.
        """
        o = self.options
        if len(self.history) < o.window:
            return self.size
        mean = sum(self.history[-o.window :]) / o.window
        if self.size == self.largest:
            falls = o.tau_down is not None and mean < o.tau_down - ROUNDING
            return self.smallest if falls else self.largest
        return self.largest if mean > o.tau + ROUNDING else self.smallest

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.size not in (self.smallest, self.largest):
            raise ValueError(f"size: is neither {self.smallest} nor {self.largest} (got {self.size})")
