"""No correction: right when the sampler is the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...base.state import Stateful
from .ratios import Evidence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NoCorrection:
    """Weight 1 for every token."""

    active = False
    weigh = False

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, dict[str, float]]:
        import torch

        return torch.ones_like(on.logp_BT[:, :1]), {}


class StepScale(Stateful):
    """Factor on the learning rate of a step; by default 1."""

    active: ClassVar[bool] = True
    """False where the learning rate never changes; no ratios are then computed for it."""

    def __call__(self, ess_ratio: float) -> float:
        """Return the factor on this step's learning rate; `ess_ratio`: effective sample size / number of rollouts."""
        return 1.0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        return {}


@dataclass(frozen=True)
class NoScale(StepScale):
    """No scale: the learning rate follows the schedule."""

    active: ClassVar[bool] = False

    def build(self) -> StepScale:
        return self
