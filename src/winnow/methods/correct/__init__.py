"""Corrections: weights for samples of an older or numerically different policy, and learning-rate scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .ess import Ess, effective_sample_size, lr_scale
from .m2po import M2PO
from .mask import Mask
from .none import NoCorrection, NoScale, StepScale
from .ratios import Evidence, log_ratio
from .truncate import Truncate

if TYPE_CHECKING:
    import torch


class Correction(Protocol):
    active: bool
    """False when every weight is 1; the clipped loss then takes its ratio to the sampler."""
    weigh: bool
    """False when weights are 0 or 1; again the loss takes that ratio, since a rollout is weighted only once."""

    def __call__(self, on: Evidence) -> tuple[torch.Tensor, Mapping[str, float | torch.Tensor]]:
        """Return detached weights, broadcastable to [B, T], and sums for the metrics.

        Sums stay tensors: to make numbers of them would wait for the device in every micro-batch.
        """
        ...


@runtime_checkable
class OverBatch(Protocol):
    """A correction that needs the whole optimizer batch before it judges a micro-batch."""

    def over_batch(self, parts: Iterable[Evidence]) -> Correction: ...


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
