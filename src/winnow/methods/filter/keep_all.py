"""No filter: every group enters the batch, as in plain GRPO."""

from __future__ import annotations

from dataclasses import dataclass

from ...types import KEEP, Group, GroupKind, Verdict
from .base import Filter


@dataclass(frozen=True)
class KeepAll(Filter):
    """Keep every group; zero-variance groups count in the denominator of the loss."""

    max_refill_rounds = 0
    admits_all = True

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        return KEEP
