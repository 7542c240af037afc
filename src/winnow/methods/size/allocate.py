"""Give each prompt the rollouts that it is worth: more where one more promises most, at the same mean.

A prompt's group grows while the next sibling adds more value than a rollout costs. The value is expected under the
prompt's `Posteriors` and concave in the size, so this greedy choice is the optimal one for its price. The price follows
the sizes: it rises while groups are larger than `num_generations` on average. Knapsack RL (arXiv 2509.25849) solves the
same problem for a whole batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from ...base.state import State
from ...config.options import CHECKED
from ...types import Group, Prompt
from ..group_kind import GroupJudge
from ..posterior import Posteriors, counts
from .base import GroupSize

GAIN = 0.05
"""Relative change of the price after a group of twice the wanted mean size."""


def signal_gains(a: float, b: float, sizes_S: np.ndarray) -> np.ndarray:
    """Return log of what one more rollout adds to E[p (1 - p)] (n - 1) / n, at a rate from Beta(a, b), float64 [S].

    The value is the expected mean squared deviation of a group's rewards.
    """
    gains_S: np.ndarray = _log_moment(a, b, 1, 1) - np.log(sizes_S) - np.log(sizes_S + 1)
    return gains_S


def knapsack_gains(a: float, b: float, sizes_S: np.ndarray) -> np.ndarray:
    """Return log of what one more rollout adds to E[P(mixed; n) p (1 - p)^2], float64 [S] (Knapsack RL, section 3).

    That is E[p^(n+1) (1 - p)^3] + E[p^2 (1 - p)^(n+2)].
    """
    gains = [np.logaddexp(_log_moment(a, b, n + 1, 3), _log_moment(a, b, 2, n + 2)) for n in sizes_S.tolist()]
    return np.array(gains)


def _log_moment(a: float, b: float, right: int, wrong: int) -> float:
    """Return log E[p^right (1 - p)^wrong]."""
    return _log_beta(a + right, b + wrong) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


GAINS = {"signal": signal_gains, "knapsack": knapsack_gains}


@dataclass(frozen=True, config=CHECKED)
class Allocate:
    """Size each group by what its next rollout is worth; on average groups have `num_generations` rollouts."""

    value: Literal["signal", "knapsack"] = "knapsack"
    """What a group is worth: `signal` is the expected squared deviation of its rewards, `knapsack` Knapsack RL's, which
    prefers hard prompts."""
    smallest: Annotated[int, Field(ge=2)] | None = None
    """None: half of `num_generations`."""
    largest: int | None = None
    """None: four times `num_generations`."""
    forget: Annotated[float, Field(gt=0, le=1)] = 0.99
    """What a prompt's rollouts are worth a step later."""
    strength: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.5
    """Rollouts that the prior is worth."""

    wants_signal: ClassVar[bool] = True

    def build(self, num_generations: int) -> AllocatedSize:
        """Build the rule. Raises ValueError unless smallest <= num_generations < largest."""
        smallest = max(2, num_generations // 2) if self.smallest is None else self.smallest
        largest = 4 * num_generations if self.largest is None else self.largest
        if not smallest <= num_generations < largest:
            raise ValueError(
                f"num_generations={num_generations}, the mean size, must lie between smallest={smallest} and "
                f"largest={largest}"
            )
        return AllocatedSize(self, num_generations, smallest, largest)


class AllocateState(State, extra="ignore"):  # the rest is the posteriors'
    log_price: float | None


class AllocatedSize(GroupSize):
    """Its state is the price and the posterior of every prompt: twelve bytes per prompt."""

    state_model = AllocateState
    judge: GroupJudge
    posteriors: Posteriors

    def __init__(self, options: Allocate, mean: int, smallest: int, largest: int) -> None:
        self.options, self.mean = options, mean
        self.smallest, self.largest = smallest, largest
        self.log_price: float | None = None
        """Logarithm of the value that a rollout must add; None: so that a prompt never seen gets the mean size."""

    def begin(self, prompts: Sequence[Prompt], judge: GroupJudge) -> None:
        judge.success.require("allocate: sizes follow pass rates")
        self.judge = judge
        self.posteriors = Posteriors(len(prompts), forget=self.options.forget, strength=self.options.strength)

    def size_for(self, prompt: Prompt) -> int:
        a, b = self.posteriors.for_prompts(np.array([prompt.ordinal]))
        gains_S = self._gains(float(a[0]), float(b[0]))
        if self.log_price is None:
            last = self.mean - self.smallest
            self.log_price = float(self._gains(*self.posteriors.prior())[max(0, last - 1) : last + 1].mean())
        size = self.smallest + int((gains_S > self.log_price).sum())
        self.log_price += GAIN * (size / self.mean - 1)
        return size

    def _gains(self, a: float, b: float) -> np.ndarray:
        """Return log of what each rollout beyond the smallest size adds to a group's value, float64 [S]; they fall."""
        return GAINS[self.options.value](a, b, np.arange(self.smallest, self.largest))

    def observe_group(self, group: Group) -> None:
        right, wrong = counts(group, self.judge)
        if right + wrong > 0:
            self.posteriors.add(group.prompt.ordinal, right, wrong)

    def observe_step(self, metrics: Mapping[str, float]) -> None:
        self.posteriors.end_step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.posteriors.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.posteriors.load_state_dict(state)
