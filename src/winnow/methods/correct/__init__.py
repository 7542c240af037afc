"""Corrections: weights for what an older or numerically different policy sampled; and learning-rate scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from .ess import Ess, effective_sample_size, lr_scale
from .m2po import M2PO
from .mask import Mask
from .none import NoCorrection, NoScale
from .ratios import Evidence, log_ratio
from .truncate import Truncate


class Correction(Protocol):
    active: bool
    """False when every weight is 1; the clipped loss then takes its ratio against the sampler itself."""
    weigh: bool
    """False when weights are 0 or 1; then, too: a rollout must be weighed once, by the weight or by that ratio."""

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, dict[str, float]]:
        """Detached weights, broadcastable to [B, T], and sums for the metrics."""
        ...


@runtime_checkable
class OverBatch(Protocol):
    """A correction that looks at the whole optimizer batch before it judges a micro-batch."""

    def over_batch(self, parts: Iterable[Evidence]) -> Correction: ...


class StepScale(Protocol):
    active: bool
    """False when the learning rate never changes; then no ratios are computed for it."""

    def __call__(self, ess_ratio: float) -> float:
        """Factor on the learning rate of this step; `ess_ratio`: effective sample size over the batch's rollouts."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the last step."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


CORRECTIONS: dict[str, type] = {"none": NoCorrection, "truncate": Truncate, "mask": Mask, "m2po": M2PO}
STEP_SCALES: dict[str, type] = {"none": NoScale, "ess": Ess}
"""Name -> frozen dataclass of options with `build() -> StepScale`."""

__all__ = [
    "CORRECTIONS",
    "STEP_SCALES",
    "Correction",
    "Evidence",
    "OverBatch",
    "StepScale",
    "effective_sample_size",
    "log_ratio",
    "lr_scale",
]
