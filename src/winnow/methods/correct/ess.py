"""Effective sample size of a batch of importance weights, and the learning-rate scale from it (VCPO)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from ...base.state import State
from ...config.options import CHECKED
from ..base import RunFacts, refuse_unused
from .none import StepScale

if TYPE_CHECKING:
    import torch


def effective_sample_size(log_w_B: torch.Tensor) -> float:
    """Return (sum w)^2 / sum w^2, between 1 and B, from log weights [B] of any size (VCPO, section 2.2; Kong 1992).

    The weights are those of whole rollouts, before truncation. Log weights of -inf (a rollout the learner would never
    sample) count as 0. Raises ValueError on an empty batch, if all are -inf, or on a weight that is NaN or infinite.
    """
    import torch

    log_w_B = torch.as_tensor(log_w_B).detach().double().reshape(-1)
    if not len(log_w_B) or torch.isnan(log_w_B).any() or (log_w_B == math.inf).any() or (log_w_B == -math.inf).all():
        raise ValueError("the effective sample size needs log weights below infinity, at least one of them finite")
    relative_B = (log_w_B - log_w_B.max()).exp()  # scaling all weights does not change it, and the largest is 1
    return float(relative_B.sum() ** 2 / (relative_B**2).sum())


def lr_scale(ess_ratio: float, reference: float = 1.0) -> float:
    """Return sqrt(min(1, ess_ratio / reference)): the share of the learning rate to use (VCPO, equation 5).

    `ess_ratio`: effective sample size over the number of rollouts; `reference`: its value on policy.
    """
    return math.sqrt(min(1.0, ess_ratio / reference))


@dataclass(frozen=True, config=CHECKED)
class Ess:
    """Shrink the learning rate with the effective sample size of the batch (VCPO)."""

    reference: float | str = 1.0
    """Effective share of the batch on policy; `measured`: the mean over the first `measured_steps` updates."""
    measured_steps: PositiveInt = 1

    def __post_init__(self) -> None:
        in_range = isinstance(self.reference, float) and 0 < self.reference <= 1
        if self.reference != "measured" and not in_range:
            raise ValueError(f"reference must lie in (0, 1], or be 'measured', not {self.reference!r}")
        if self.reference != "measured":
            refuse_unused(self, ["measured_steps"], f"with reference: {self.reference}; remove one of them")

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.config.lora is not None and run.config.lora.dropout:
            yield "ess would take the noise of dropout for a change of the policy; set dropout: 0 in lora"

    def build(self) -> EssScale:
        return EssScale(self)


class EssState(State):
    seen: list[float]


class EssScale(StepScale):
    """Learning-rate scale from the effective sample size. It is 1 while the reference is still measured."""

    state_model = EssState

    def __init__(self, options: Ess) -> None:
        self.options = options
        self.seen: list[float] = []
        """Effective shares of the updates that measure the reference."""

    @property
    def reference(self) -> float | None:
        """Reference share; None until it is measured."""
        if self.options.reference != "measured":
            return float(self.options.reference)
        return sum(self.seen) / len(self.seen) if len(self.seen) >= self.options.measured_steps else None

    def __call__(self, ess_ratio: float) -> float:
        if (reference := self.reference) is None:
            self.seen.append(ess_ratio)
            return 1.0
        return lr_scale(ess_ratio, reference)

    def metrics(self) -> dict[str, float]:
        return {} if self.reference is None else {"ess_ratio/reference": self.reference}
