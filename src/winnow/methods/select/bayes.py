"""Select by posterior: roll out a prompt less often when its group is less likely to have a signal.

The chance of a signal has a closed form under a prompt's `Posteriors`, so nothing is drawn from them. Draws are
keyed by (seed, prompt, epoch) and their probabilities recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from ...base.state import Probability, State
from ...config.options import CHECKED
from ...types import Group, Prompt, Verdict
from ..base import Chart
from ..group_kind import BY_REWARDS, GroupJudge
from ..posterior import Posteriors, Predictions, charts, counts, signal_probability
from .stream import StreamSelector, StreamState


@dataclass(frozen=True, config=CHECKED)
class Bayes:
    """Roll out a prompt by the chance that its group has a signal, relative to a prompt never seen, to a power."""

    wants_signal: ClassVar[bool] = True

    forget: Annotated[float, Field(gt=0, le=1)] = 0.99
    """What a prompt's rollouts are worth a step later."""
    strength: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.5
    """Rollouts that the prior is worth, and to which what was seen of a prompt falls at most."""
    power: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """How sharply less likely groups are left out."""
    floor: Probability = 0.05
    """Lowest probability to roll out a prompt."""

    def charts(self, name: str) -> list[Chart]:
        return charts("bayes")

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> BayesSelector:
        """Build the selector. Raises ValueError when right answers are unknown."""
        judge.success.require("bayes: pass rates count right answers")
        return BayesSelector(prompts, seed, self, judge)


class BayesState(StreamState):
    size: PositiveInt


class BayesSelector(StreamSelector):
    """Selector by posterior. Twelve bytes per prompt and four for the order of the epoch."""

    state_model: ClassVar[type[State]] = BayesState

    def __init__(self, prompts: Sequence[Prompt], seed: int, options: Bayes, judge: GroupJudge) -> None:
        super().__init__(prompts, seed)
        self.options, self.judge = options, judge
        self.posteriors = Posteriors(len(prompts), forget=options.forget, strength=options.strength)
        self.size = 8
        """Size of the last step's smallest group; where there are probes, they decide."""
        self._sizes: list[int] = []
        self._predictions = Predictions(self.judge)

    def keep_probability(self, ordinals_N: np.ndarray) -> np.ndarray:
        """Return the probability to roll out each prompt, float64 [N]; 1 for one as promising as a new prompt."""
        teaches = self.judge.teaching_counts(max(self.probe or self.size, self.judge.least))
        prior_a, prior_b = self.posteriors.prior()
        unseen = signal_probability(np.array([prior_a]), np.array([prior_b]), teaches)
        keep_N = signal_probability(*self.posteriors.for_prompts(ordinals_N), teaches) / unseen
        return np.clip(keep_N**self.options.power, self.options.floor, 1.0)

    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        return self.draws(ordinals_N, epoch) < self.keep_probability(ordinals_N)

    def verdicts(self, ordinals_N: np.ndarray, keeps_N: np.ndarray) -> list[Verdict]:
        p_N, (a_N, b_N) = self.keep_probability(ordinals_N), self.posteriors.for_prompts(ordinals_N)
        return [
            Verdict(True, probability=p) if keep else Verdict(False, f"bayes: a pass rate of about {rate:.2f}", 1 - p)
            for keep, p, rate in zip(*(x.tolist() for x in (keeps_N, p_N, a_N / (a_N + b_N))), strict=True)
        ]

    def observe_group(self, group: Group) -> None:
        right, wrong = counts(group, self.judge)
        if right + wrong < 2:
            return
        a, b = self.posteriors.for_prompts(np.array([group.prompt.ordinal]))
        self._predictions.add(group, a.item(), b.item(), self.probe)
        self._sizes.append(len(group.siblings))
        self.posteriors.add(group.prompt.ordinal, right, wrong)

    def end_step(self) -> None:
        super().end_step()
        self.posteriors.end_step()
        self.size = min(self._sizes, default=self.size)
        self._sizes = []
        self._predictions = Predictions(self.judge)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self._predictions.metrics("bayes")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.posteriors.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.posteriors.load_state_dict(state)
