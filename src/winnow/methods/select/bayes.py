"""Select by posterior: roll out a prompt the rarer, the less likely its group is to be mixed.

Each prompt has a Beta posterior of its pass rate, whose prior is the run's mean rate. While the policy changes the
posterior becomes less sure, but keeps its mean: a prompt that was never solved rarely is the next time. The chance of a
mixed group has a closed form. Draws are keyed by (seed, prompt, epoch) and their probabilities recorded. Kin: MoPPS and
BOTS, which take the prompts with drawn rates nearest to 1/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from ...base.array_json import Packed
from ...base.options import CHECKED
from ...base.state import Count, Probability, State
from ...types import Group, GroupKind, Prompt, Verdict
from ..base import Chart
from ..group_kind import BY_REWARDS, GroupJudge
from .stream import StreamSelector, StreamState


def mixed_probability(a: np.ndarray, b: np.ndarray, size: int) -> np.ndarray:
    """Return the chance that `size` rollouts are neither all right nor all wrong, at a rate from Beta(a, b).

    1 - E[p^G + (1 - p)^G] in closed form. float64 arrays that broadcast.
    """
    k = np.arange(size)
    total = np.add.outer(k, a + b)
    mixed: np.ndarray = 1.0 - (np.add.outer(k, a) / total).prod(0) - (np.add.outer(k, b) / total).prod(0)
    return mixed


@dataclass(frozen=True, config=CHECKED)
class Bayes:
    """Roll out a prompt by the chance that its group is mixed, relative to a prompt never seen, to a power."""

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
        lines = {"bayes/predicted": "predicted", "bayes/mixed": "found"}
        return [Chart("Mixed groups among those rolled out", lines, share=True)]

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> BayesSelector:
        return BayesSelector(prompts, seed, self, judge)


class BayesState(StreamState):
    a_N: Annotated[np.ndarray, Packed("f4", "prompts")] = Field(alias="a")
    b_N: Annotated[np.ndarray, Packed("f4", "prompts")] = Field(alias="b")
    seen_at_N: Annotated[np.ndarray, Packed("u4", "prompts")] = Field(alias="seen_at")
    step: Count
    size: PositiveInt
    all_right: NonNegativeFloat
    all_rollouts: NonNegativeFloat


class BayesSelector(StreamSelector):
    """Selector by posterior. Twelve bytes per prompt and four for the order of the epoch."""

    state_model: ClassVar[type[State]] = BayesState

    def __init__(self, prompts: Sequence[Prompt], seed: int, options: Bayes, judge: GroupJudge) -> None:
        super().__init__(prompts, seed)
        self.options, self.judge = options, judge
        self.a_N = np.zeros(len(prompts), np.float32)
        self.b_N = np.zeros(len(prompts), np.float32)
        """Posteriors after each prompt's last group, with the prior; 0 for prompts never seen."""
        self.seen_at_N = np.zeros(len(prompts), np.uint32)
        """Step of that group."""
        self.step, self.size = 0, 8
        """Steps so far, and the size of the last step's smallest group: a probe decides whether its group is mixed."""
        self._sizes: list[int] = []
        self.all_right, self.all_rollouts = 1.0, 2.0
        """Right rollouts and all, of all prompts, forgotten likewise."""
        self._found: list[tuple[float, float, float, bool]] = []
        """Posterior before each group of this step, the size to predict for, and whether it was mixed."""

    def posterior(self, ordinals_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a and b of the prompts' Beta posteriors, float64 [N]."""
        strength = self.options.strength
        a_N, b_N = self.a_N[ordinals_N].astype(np.float64), self.b_N[ordinals_N].astype(np.float64)
        worth_N = a_N + b_N
        unseen_N = worth_N == 0
        age_N = self.step - self.seen_at_N[ordinals_N].astype(np.float64)
        left_N = np.maximum(self.options.forget**age_N, strength / (worth_N + unseen_N))
        prior = self.prior()
        return a_N * left_N + unseen_N * prior, b_N * left_N + unseen_N * (strength - prior)

    def prior(self) -> float:
        """Return a of a prompt never seen; its b is `strength` - a."""
        return self.options.strength * self.all_right / self.all_rollouts

    def keep_probability(self, ordinals_N: np.ndarray) -> np.ndarray:
        """Return the probability to roll out each prompt, float64 [N]: 1 for who is as promising as one never seen."""
        prior = self.prior()
        unseen = mixed_probability(np.array([prior]), np.array([self.options.strength - prior]), self.size)
        keep_N = mixed_probability(*self.posterior(ordinals_N), self.size) / unseen
        return np.clip(keep_N**self.options.power, self.options.floor, 1.0)

    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        return self.draws(ordinals_N, epoch) < self.keep_probability(ordinals_N)

    def verdicts(self, ordinals_N: np.ndarray, keeps_N: np.ndarray) -> list[Verdict]:
        p_N, (a_N, b_N) = self.keep_probability(ordinals_N), self.posterior(ordinals_N)
        return [
            Verdict(True, probability=p) if keep else Verdict(False, f"bayes: a pass rate of about {rate:.2f}", 1 - p)
            for keep, p, rate in zip(*(x.tolist() for x in (keeps_N, p_N, a_N / (a_N + b_N))), strict=True)
        ]

    def observe(self, group: Group) -> None:
        """Count right and wrong rollouts; failed, pruned and undecided ones, and groups that were cut, are absent.

        Where rewards differ but none or all are right, half of them count as right: such a group teaches.
        """
        judged = [self.judge.success.right(r) for r in group.siblings if r.reward is not None]
        right, wrong = float(judged.count(True)), float(judged.count(False))
        if right + wrong < 2:
            return
        mixed = self.judge.kind(group) is GroupKind.SIGNAL
        if mixed and not right * wrong:
            right = wrong = (right + wrong) / 2
        ordinals = np.array([group.prompt.ordinal])
        a, b = self.posterior(ordinals)
        self._found.append((float(a[0]), float(b[0]), min(self.size, right + wrong), mixed))
        self.a_N[ordinals], self.b_N[ordinals] = a + right, b + wrong
        self.seen_at_N[ordinals] = self.step
        self._sizes.append(len(group.siblings))
        self.all_right, self.all_rollouts = self.all_right + right, self.all_rollouts + right + wrong

    def end_step(self) -> None:
        super().end_step()
        self.step += 1
        self.size = min(self._sizes, default=self.size)
        self._sizes = []
        forget = self.options.forget
        self.all_right, self.all_rollouts = 1 + (self.all_right - 1) * forget, 2 + (self.all_rollouts - 2) * forget
        self._found = []

    def metrics(self) -> dict[str, float]:
        found = super().metrics()
        if self._found:
            a, b, sizes, mixed = np.array(self._found).T
            predicted = np.zeros(len(sizes))
            for size in np.unique(sizes):
                predicted[sizes == size] = mixed_probability(a[sizes == size], b[sizes == size], int(size))
            found["bayes/predicted"], found["bayes/mixed"] = float(predicted.mean()), float(mixed.mean())
            found["bayes/brier"] = float(((predicted - mixed) ** 2).mean())
        return found
