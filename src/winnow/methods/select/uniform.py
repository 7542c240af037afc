"""Every prompt once per epoch, without skips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...types import Prompt
from ..group_kind import BY_REWARDS, GroupJudge
from .stream import StreamSelector


@dataclass(frozen=True)
class Uniform:
    """Visit every prompt once per epoch; `shuffle: false` keeps the order of the data set."""

    shuffle: bool = True

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> StreamSelector:
        return StreamSelector(prompts, seed, order_N=None if self.shuffle else np.arange(len(prompts)))
