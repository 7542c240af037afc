"""Base of advantages whose baseline depends on the policy, so that only the update can compute it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np

from ...config.options import name_of
from ..base import RunFacts
from ..correct import OverBatch
from ._base import Advantage
from .dr_grpo import dr_grpo

Scope = Literal["group", "minibatch"]
Weighing = Literal["gradient", "energy"]
"""Weight of a reward in the baseline: the squared norm of its rollout's gradient, or, per token, the energy of the
logits so far."""


class InUpdate(Advantage):
    """Rows of these advantages carry rewards and the number of the rows that share their baseline.

    `of_batch` gives the advantages at equal weights of all rollouts; filters, audits and statistics use those.
    """

    weighing: ClassVar[Weighing]

    @property
    def scope(self) -> Scope:
        """Rollouts that share a baseline."""
        return "group"

    def factor(self, rewards_G: np.ndarray) -> float:
        """Return the factor on the group's deviations from the baseline; 0 leaves the group out."""
        return 1.0

    def problems(self, run: RunFacts) -> Iterator[str]:
        """Yield why the loss is not a sum over rollouts of (reward - baseline) times a known factor."""
        c, (correction,) = run.config, run.options["correction"]
        name = name_of(c.advantage)
        beta = 0.0 if c.kl_in_reward else c.beta
        finds = f"{name} finds its baseline in the update"
        if name_of(c.policy_loss) != "plain":
            yield f"{finds}: set policy_loss: plain, not {name_of(c.policy_loss)}"
        if beta or c.entropy_coef:
            yield f"{finds}: set beta: 0 and entropy_coef: 0, not {beta} and {c.entropy_coef}"
        if isinstance(correction, OverBatch) or getattr(correction, "only_negative", False):
            yield f"{finds}: correction: choose one that does not go by the sign of the advantage, e.g. truncate"
        if self.weighing == "gradient" and c.dtype == "float16":
            yield (
                f"{name} squares gradients of single rollouts, which float16 rounds to 0; set dtype: bfloat16 or "
                "float32"
            )

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        """Return the advantages of one group as the whole batch: float64 [G] -> float64 [G]; NaN in, NaN out."""
        return dr_grpo(rewards_G) * self.factor(rewards_G)
