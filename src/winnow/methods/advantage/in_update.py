"""Base of advantages whose baseline depends on the policy, so that only the update can find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from ...types import Group
from ..correct import OverBatch
from .dr_grpo import dr_grpo

if TYPE_CHECKING:
    from ..loss import LossConfig

Scope = Literal["group", "minibatch"]
Weighing = Literal["gradient", "energy"]
"""Weight of a reward in the baseline: the squared norm of its rollout's gradient, or, token by token, the energy of
the logits so far."""


class InUpdate:
    """Rows of these advantages carry rewards, and the number of the rows that they have a baseline in common with.

    `of_batch` is what they would be if all rollouts weighed the same: what filters, audits and statistics go by.
    """

    weighing: ClassVar[Weighing]
    greedy_baseline: ClassVar[bool] = False

    @property
    def scope(self) -> Scope:
        """Over which rollouts the baseline is taken."""
        return "group"

    @property
    def group_relative(self) -> bool:
        return True

    @property
    def scaled(self) -> bool:
        return False

    @property
    def smallest_group(self) -> int:
        return 2

    def factor(self, rewards_G: np.ndarray) -> float:
        """Factor on the group's deviations from the baseline; 0 leaves the group out."""
        return 1.0

    def problem(self, loss: LossConfig) -> str:
        """Why this loss is not the sum over rollouts of (reward - baseline) times something known; empty if it is."""
        if loss.policy_loss != "plain":
            return f"set policy_loss: plain, not {loss.policy_loss}"
        if loss.beta or loss.entropy_coef:
            return f"set beta: 0 and entropy_coef: 0, not {loss.beta} and {loss.entropy_coef}"
        if isinstance(loss.correction, OverBatch) or getattr(loss.correction, "only_negative", False):
            return "correction: choose one that does not go by the sign of the advantage, e.g. truncate"
        return ""

    def __call__(self, rewards_G: np.ndarray) -> np.ndarray:
        """One group as the whole batch: float64 [G] -> float64 [G]; NaN in, NaN out."""
        return dr_grpo(rewards_G) * self.factor(rewards_G)

    def of_batch(self, groups: Sequence[Group]) -> list[np.ndarray]:
        return [self(group.rewards()) for group in groups]
