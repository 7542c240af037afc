"""Every prompt once per epoch, without skips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...types import Prompt
from ..group_kind import BY_REWARDS, GroupJudge
from .stream import StreamSelector


@dataclass(frozen=True)
class Uniform:
    """Visit every prompt once per epoch, in a new order each time."""

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> StreamSelector:
        return StreamSelector(prompts, seed)
