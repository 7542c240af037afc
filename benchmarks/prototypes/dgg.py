"""DGG (2605.19425): skip a second use of groups whose gradient of the head is larger than those of first uses.

For `reuse: {updates: 2}`, where a second use is the last: what is skipped has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from winnow.learner import Learner, LearnerContext, Local, Policy
from winnow.learner.base import OF_ROWS, Stats
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.types import Rollout

REMEMBERED = 32
"""Updates after which no group is used again; more than `reuse.max_age`."""


@dataclass(frozen=True)
class Dgg:
    """Train second uses only if the head's gradient norm is within a running quantile of that of first uses."""

    quantile: float = 0.9
    window: int = 32
    """Updates whose first uses are compared with. Nothing is skipped before."""

    def build(self, policy: Policy, context: LearnerContext) -> GatedLearner:
        return GatedLearner(Local().build(policy, context), policy.model, self)


class GatedLearner:
    """The local learner; first and second uses of an update go through the model apart.

    An update's second uses are skipped together. Both norms are of a mean over rollouts. A head that is tied to the
    embedding has one gradient with it, whose norm is then taken.
    """

    def __init__(self, local: Learner, model: Any, options: Dgg) -> None:
        self.local, self.options = local, options
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.head: torch.nn.Parameter = model.get_output_embeddings().weight
        self.norms: deque[float] = deque(maxlen=options.window)
        """Of first uses, by update."""
        self.used: deque[dict[int, Rollout]] = deque(maxlen=REMEMBERED)
        """Rollouts by id, of each update that used them first. They are kept, so that no other gets their id."""
        self.skips = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def accumulate(self, rows: Sequence[Row], loss: LossConfig, iteration: int = 0) -> Stats:
        if iteration:
            raise ValueError("num_iterations: dgg makes one pass over the rows of an update; set num_iterations: 1")
        used = {number for rollouts in self.used for number in rollouts}
        first = [row for row in rows if id(row.rollout) not in used]
        second = [row for row in rows if id(row.rollout) in used]
        self.used.append({id(row.rollout): row.rollout for row in first})
        stats = self._second_uses(second, loss, needed=not first) if second else Stats()
        if first:
            before = None if self.head.grad is None else self.head.grad.clone()
            add(stats, self.local.accumulate(first, loss))
            self.norms.append(self._norm(first, before))
        return stats

    def _second_uses(self, rows: Sequence[Row], loss: LossConfig, *, needed: bool) -> Stats:
        """Add the gradients of second uses, or skip them. `needed`: an update without them would have no row."""
        stats = self.local.accumulate(rows, loss)
        if needed or not self.is_excessive(self._norm(rows, None)):
            return stats
        self.skips += 1
        for parameter in self.parameters:
            parameter.grad = None
        return Stats()

    def is_excessive(self, norm: float) -> bool:
        """Return whether a norm is above the quantile of first uses; False until the window is full."""
        return len(self.norms) == self.options.window and norm > np.quantile(self.norms, self.options.quantile)

    def _norm(self, rows: Sequence[Row], before: torch.Tensor | None) -> float:
        """Return the norm of the head's mean gradient over these rows. `before`: the gradient without them."""
        gradient = self.head.grad
        assert gradient is not None
        added = gradient if before is None else gradient - before
        return float(added.norm()) / sum(row.weight for row in rows)

    def metrics(self) -> dict[str, float]:
        """Return the local learner's metrics, and the number of updates so far whose second uses were skipped."""
        return {**self.local.metrics(), "reuse/skips": float(self.skips)}


def add(stats: Stats, more: Stats) -> None:
    """Add the statistics of other rows."""
    for name, value in more.sums.items():
        stats.add(name, value)
    for name in OF_ROWS:
        getattr(stats, name).extend(getattr(more, name))
