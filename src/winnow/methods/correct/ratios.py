"""Importance ratios between learner and sampler, in log space against overflow, and bounds on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..segments import first_rows, sum_at_rows

if TYPE_CHECKING:
    import torch

Level = Literal["token", "sequence", "geometric"]
MAX_RATIO = 1e6
"""Largest weight where no bound applies."""


class Evidence(NamedTuple):
    """Input of a correction: B rows of T positions."""

    logp_BT: torch.Tensor
    """Log-probabilities under the learner."""
    sampler_logp_BT: torch.Tensor
    mask_BT: torch.Tensor
    """True for action tokens."""
    advantages_B: torch.Tensor
    rollout_B: torch.Tensor | None = None
    """Rollout of each row (`methods.segments`)."""


def log_ratio(
    logp_BT: torch.Tensor,
    sampler_logp_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    level: Level,
    rollout_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log(learner / sampler) over action tokens, detached: [B, T] for `token`, else [B, 1].

    `sequence`: the sum over a rollout's action tokens, the log ratio of the whole rollout. `geometric`: their mean, the
    log of the geometric mean of the token ratios (GSPO, Zheng et al. 2025); 0 for a row without action tokens. Outside
    the mask a token's log ratio is 0. Both log-probabilities must be of the same distribution: after temperature, top-p
    and top-k. Raises ValueError on an unknown level.
    """
    import torch

    difference_BT = torch.where(mask_BT.bool(), logp_BT.detach() - sampler_logp_BT, 0.0)
    if level == "token":
        return difference_BT
    total_B1 = sum_at_rows(difference_BT.sum(1, keepdim=True), rollout_B)
    if level == "sequence":
        return total_B1
    if level == "geometric":
        return total_B1 / sum_at_rows(mask_BT.sum(1, keepdim=True), rollout_B).clamp(min=1)
    raise ValueError(f"level must be token, sequence or geometric, not {level!r}")


def weight(log_w: torch.Tensor) -> torch.Tensor:
    """Return the ratio itself, never infinite."""
    return log_w.clamp(max=math.log(MAX_RATIO)).exp()


@dataclass(frozen=True)
class Bounded:
    """Bounds on the ratio: `low` and `high`; `high: null` is no upper bound. Log space avoids overflow."""

    level: Level = "sequence"
    low: float = 0.0
    high: float | None = 8.0
    active = True
    weigh = True

    def __post_init__(self) -> None:
        if not 0 <= self.low < (math.inf if self.high is None else self.high):
            raise ValueError(f"bounds must satisfy 0 <= low < high, not low={self.low}, high={self.high}")

    @property
    def log_bounds(self) -> tuple[float, float]:
        return math.log(self.low) if self.low > 0 else -math.inf, math.inf if self.high is None else math.log(self.high)

    def _judged(self, on: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log ratios and which of them are out of bounds, [B, T] or [B, 1]."""
        log_w = log_ratio(on.logp_BT, on.sampler_logp_BT, on.mask_BT, self.level, on.rollout_B)
        low, high = self.log_bounds
        return log_w, (log_w < low) | (log_w > high)

    def _counts(self, outside: torch.Tensor, on: Evidence) -> dict[str, torch.Tensor]:
        """Return the number of tokens or rollouts out of bounds, and the total."""
        counted = on.mask_BT.bool()
        if self.level != "token":
            counted = first_rows(counted.any(1, keepdim=True), on.rollout_B)
            outside = first_rows(outside, on.rollout_B)
        return {"clipped": (outside & counted).sum(), "clipped_of": counted.sum()}
