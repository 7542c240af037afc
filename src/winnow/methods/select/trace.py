"""Memory of every prompt's current run of zero-variance visits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from ...base.array_json import Packed
from ...base.state import State
from ...types import Group, GroupKind, Prompt
from ..group_kind import GroupJudge, share_seen
from .stream import StreamSelector, StreamState

EFFECTIVE, EASY, HARD = 0, 1, 2
KINDS = {GroupKind.SIGNAL: EFFECTIVE, GroupKind.EASY: EASY, GroupKind.HARD: HARD, GroupKind.UNKNOWN: HARD}
"""Equal rewards count as hard unless they are known to be right."""


class TraceState(StreamState):
    z_N: Annotated[np.ndarray, Packed("f4", "prompts")] = Field(alias="z")
    kind_N: Annotated[np.ndarray, Packed("u1", "prompts", index=HARD + 1)] = Field(alias="kind")


class TraceSelector(StreamSelector):
    """Adds to the stream, for each of N prompts, `z_N` and `kind_N`: five bytes per prompt.

    z is the length of the current run of consecutive zero-variance visits of either kind (eq. 4), kind that of the last
    one. Only rewards move it:

    - Rewards that differ end the run, however many siblings are missing.
    - Equal rewards of m siblings out of G add m / G: the rewards of the G - m pruned or failed ones are unknown. For
      independent siblings this is the visit's share of a full one in log-likelihood. The survivors of a quality head
      are no random sample. But if it keeps the rarer outcome more often, as `balance: target` does, equal survivors are
      more than m siblings' worth of evidence; so the weight is on the cautious side.
    - A group that a gate cut, or with too few rewards, leaves the run as it was. With audits some cuts are overridden:
      those groups have rewards, so the trace learns from them, at the audit's rate, the worth of the cuts.
    """

    state_model: ClassVar[type[State]] = TraceState

    def __init__(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge) -> None:
        super().__init__(prompts, seed)
        self.judge = judge
        self.z_N = np.zeros(len(prompts), np.float32)
        self.kind_N = np.zeros(len(prompts), np.uint8)

    def observe_group(self, group: Group) -> None:
        kind = self.judge.kind(group)
        if kind is GroupKind.NOT_JUDGED:
            return
        if group.verdict.keep:
            ordinal, code = group.prompt.ordinal, KINDS[kind]
            self.z_N[ordinal] = 0 if code == EFFECTIVE else float(self.z_N[ordinal]) + share_seen(group)
            self.kind_N[ordinal] = code
        self._judged(group, kind)

    def _judged(self, group: Group, kind: GroupKind) -> None:
        """Handle a judged group, also one that was cut on evidence; a hook for subclasses."""
