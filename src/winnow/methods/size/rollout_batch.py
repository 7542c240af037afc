"""Rollout batches: how many groups to start when the training batch still lacks some.

`exact` starts one for each that is missing, as soon as it is missing, and never has a surplus. `fixed` and `adaptive`
work in rounds, as systems do whose engine takes a batch at a time: fewer rounds, but some groups come out superfluous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..select.greso import rollout_batch_size

Surplus = Literal["carry", "discard"]


@dataclass(frozen=True)
class Exact:
    """One group for each that is missing, started at once."""

    def build(self, prompts_per_step: int) -> OneForOne:
        return OneForOne(prompts_per_step)


@dataclass(frozen=True)
class Fixed:
    """Rounds of `size` groups until the batch is full, as DAPO's dynamic sampling is usually implemented."""

    size: int | None = None
    """None: one and a half training batches (GRESO's setting: 384 for 256)."""
    surplus: Surplus = "carry"
    """`carry` keeps superfluous groups for the next step, one step old by then; `discard` drops them."""

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"size must be >= 1, not {self.size}")

    def build(self, prompts_per_step: int) -> Rounds:
        return Rounds(self.size or -(-3 * prompts_per_step // 2), None, self.surplus == "carry")


@dataclass(frozen=True)
class Adaptive:
    """GRESO's adaptive rollout batch (Zheng et al. 2025, eq. 6): rounds just large enough to fill the batch."""

    size: int | None = None
    """Largest round; None: one and a half training batches."""
    safety: float = 1.25
    surplus: Surplus = "carry"

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"size must be >= 1, not {self.size}")
        if not 0 < self.safety < math.inf:
            raise ValueError(f"safety must be finite and > 0, not {self.safety}")

    def build(self, prompts_per_step: int) -> Rounds:
        return Rounds(self.size or -(-3 * prompts_per_step // 2), self.safety, self.surplus == "carry")


@dataclass(frozen=True)
class OneForOne:
    """There are no rounds; a batch's worth of groups counts as one."""

    size: int
    carry = False

    def next(self, missing: int, in_flight: int, zero_variance_share: float) -> int:
        return missing - in_flight


@dataclass(frozen=True)
class Rounds:
    """A round starts when the one before is over; `safety` None is a fixed size."""

    size: int
    safety: float | None
    carry: bool

    def next(self, missing: int, in_flight: int, zero_variance_share: float) -> int:
        if in_flight or missing <= 0:
            return 0
        if self.safety is None:
            return self.size
        return rollout_batch_size(missing, zero_variance_share, self.size, self.safety)
