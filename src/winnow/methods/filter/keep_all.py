"""No filter: every group enters the batch, as in plain GRPO."""

from __future__ import annotations

from dataclasses import dataclass

from ...types import KEEP, Group, GroupKind, Verdict


@dataclass(frozen=True)
class KeepAll:
    """Keep every group; zero-variance groups count in the denominator of the loss."""

    refill = False
    max_refill_rounds = 0
    wants_signal = False

    def admit(self, group: Group, kind: GroupKind) -> Verdict:
        return KEEP
