"""Linear backoff: after k zero-variance visits in a row, skip a prompt for k epochs (GRESO's ablation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ...base.array_json import Packed
from ...types import KEEP, Group, GroupKind, Prompt, Verdict
from ..group_kind import BY_REWARDS, GroupJudge
from .trace import TraceSelector, TraceState

ROUNDING = 1e-3
"""Tolerance of a sum of partly seen visits: three thirds are one."""


@dataclass(frozen=True)
class Backoff:
    """Linear backoff (Zheng et al. 2025, appendix 12.2): k zero-variance visits in a row -> skip k epochs."""

    wants_signal: ClassVar[bool] = True

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> BackoffSelector:
        return BackoffSelector(prompts, seed, judge)


class BackoffState(TraceState):
    last_epoch_N: Annotated[np.ndarray, Packed("u4", "prompts")] = Field(alias="last_epoch")


class BackoffSelector(TraceSelector):
    """Selector with linear backoff. Nine bytes per prompt for the trace and four for the order of the epoch."""

    state_model = BackoffState

    def __init__(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge) -> None:
        super().__init__(prompts, seed, judge)
        self.last_epoch_N = np.zeros(len(prompts), np.uint32)
        """Epoch of the last judged visit. Cut visits count, or a prompt that is always cut would never back off."""

    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        visits_N = np.floor(self.z_N[ordinals_N] + ROUNDING).astype(np.int64)
        keeps: np.ndarray = (visits_N == 0) | (epoch > self.last_epoch_N[ordinals_N] + visits_N)
        return keeps

    def verdict_on(self, ordinal: int, keep: bool) -> Verdict:
        return KEEP if keep else Verdict(False, f"backoff: {self.z_N[ordinal]:g} zero-variance visits in a row")

    def _judged(self, group: Group, kind: GroupKind) -> None:
        self.last_epoch_N[group.prompt.ordinal] = group.visit.epoch
