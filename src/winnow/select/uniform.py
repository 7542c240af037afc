"""Every prompt once an epoch, in an order shuffled anew each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..types import Group, Prompt, Visit


@dataclass(frozen=True)
class Uniform:
    """Visit every prompt once an epoch; `shuffle: false` keeps the order of the data set."""

    shuffle: bool = True

    def build(self, prompts: Sequence[Prompt], seed: int) -> UniformSelector:
        return UniformSelector(prompts, seed, self.shuffle)


class UniformSelector:
    """The order of epoch e is a function of (seed, e) alone, so the cursor is all the state there is."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise ValueError("there are no training prompts to select from")
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.visits = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> np.ndarray:
        n = len(self.prompts)
        return np.random.default_rng((self.seed, epoch)).permutation(n) if self.shuffle else np.arange(n)

    def select(self, n: int) -> list[Visit]:
        visits = []
        for _ in range(n):
            epoch, position = divmod(self.visits, len(self.prompts))
            if position == 0:
                self._order = self._order_of(epoch)
            visits.append(Visit(self.visits, epoch, self.prompts[int(self._order[position])]))
            self.visits += 1
        return visits

    def observe(self, group: Group) -> None:
        """Uniform selection learns nothing."""

    def metrics(self) -> dict[str, float]:
        return {"epoch": self.visits / len(self.prompts)}

    def state_dict(self) -> dict[str, Any]:
        return {"visits": self.visits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.visits = int(state["visits"])
        self._order = self._order_of(self.visits // len(self.prompts))
