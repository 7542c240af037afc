"""What selectors remember of every prompt: the run of zero-variance visits it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base.packed import pack, unpack
from ...types import Group, Prompt
from ..filter.zero_variance import Judge
from .stream import StreamSelector

EFFECTIVE, EASY, HARD = 0, 1, 2
KINDS = {"easy": EASY, "hard": HARD, None: EFFECTIVE}
LONGEST = np.iinfo(np.uint16).max


class TraceSelector(StreamSelector):
    """Adds to the stream, for each of N prompts, `z_N` and `kind_N`: three bytes a prompt.

    z is the length of the current run of consecutive zero-variance visits of either kind, kind that of the last one.
    A group with too few rewards (an infrastructure failure) is no evidence and leaves the trace as it was.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, judge: Judge) -> None:
        super().__init__(prompts, seed)
        self.judge = judge
        self.z_N = np.zeros(len(prompts), np.uint16)
        self.kind_N = np.zeros(len(prompts), np.uint8)

    def observe(self, group: Group) -> None:
        if np.count_nonzero(~np.isnan(group.rewards())) >= self.judge.least:
            self._trace(group, KINDS[self.judge.kind(group)])

    def _trace(self, group: Group, kind: int) -> None:
        ordinal = group.prompt.ordinal
        self.z_N[ordinal] = 0 if kind == EFFECTIVE else min(int(self.z_N[ordinal]) + 1, LONGEST)
        self.kind_N[ordinal] = kind

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"z": pack(self.z_N), "kind": pack(self.kind_N)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.z_N, self.kind_N = unpack(state["z"]), unpack(state["kind"])
