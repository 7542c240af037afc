"""Stop a random share of the groups at an environment step: the control arm that a gate must beat (appendix E.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...base.noise import as_tensor, noise_key, uniform
from ...types import EnvStep, Group, GroupView, Verdict

RANDOM_STREAM = 5
"""Keeps these draws apart from other noise."""


@dataclass(frozen=True)
class RandomCut:
    """Cut groups at random at an environment step, as a control for other gates."""

    k: int = 10
    share: float = 0.2
    """Probability that a group which still runs at step k is cut."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k counts environment steps from 1, not {self.k}")
        if not 0 < self.share < 1:
            raise ValueError(f"share must lie in (0, 1), not {self.share}")

    def build(self, seed: int) -> RandomCutGate:
        return RandomCutGate(self, seed)


class RandomCutGate:
    """The draw is a function of seed, prompt and epoch, so it does not depend on what else runs."""

    needs: frozenset[str] = frozenset()

    def __init__(self, options: RandomCut, seed: int) -> None:
        self.at = EnvStep(options.k)
        self._options, self._seed = options, seed
        self._asked = self._cut = 0

    def decide(self, view: GroupView) -> Verdict:
        share, k = self._options.share, self._options.k
        key = noise_key(self._seed, RANDOM_STREAM, view.visit.prompt.ordinal, view.visit.epoch)
        cut = float(uniform(as_tensor([key]), torch.tensor([k]))) < share
        self._asked += 1
        self._cut += cut
        return Verdict(False, f"random cut at step {k}", share) if cut else Verdict(True, probability=1 - share)

    def observe(self, group: Group) -> None:
        """Nothing is learned."""

    def end_step(self) -> None:
        self._asked = self._cut = 0

    def metrics(self) -> dict[str, float]:
        """Of this step: decisions taken, and the share that cut; nothing without decisions."""
        if not self._asked:
            return {}
        return {"gate/random/asked": float(self._asked), "gate/random/cut_share": self._cut / self._asked}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
