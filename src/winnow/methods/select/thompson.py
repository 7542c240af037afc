"""Thompson sampling: of some prompts in a row, roll out the one whose drawn pass rate is nearest to a target.

MoPPS (arXiv 2507.04632); BOTS (arXiv 2510.26374) is similar. `selector: bayes` integrates over the rate instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from ...base.array_json import Packed
from ...base.state import Probability, State
from ...config.options import CHECKED
from ...types import KEEP, Group, Prompt, Verdict
from ..base import Chart
from ..group_kind import BY_REWARDS, GroupJudge
from ..posterior import Predictions, charts, counts
from .stream import SELECT_STREAM, StreamSelector, StreamState

SETS = 32
"""Sets of candidates whose rates are drawn at once: making a generator takes longer than drawing a set's rates."""


@dataclass(frozen=True, config=CHECKED)
class Thompson:
    """Of every `candidates` prompts in the epoch's order, roll out the one whose drawn rate is nearest to `target`."""

    wants_signal: ClassVar[bool] = True

    candidates: Annotated[int, Field(ge=2)] = 4
    target: Probability = 0.5
    keep: Annotated[float, Field(ge=0, le=1)] = 0.5
    """What a posterior keeps of earlier visits when its prompt is visited again; the rest falls back to the prior."""

    def charts(self, name: str) -> list[Chart]:
        return charts("thompson")

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> ThompsonSelector:
        """Build the selector. Raises ValueError when right answers are unknown."""
        judge.success.require("thompson: pass rates count right answers")
        return ThompsonSelector(prompts, seed, self, judge)


class ThompsonState(StreamState):
    right_N: Annotated[np.ndarray, Packed("f4", "prompts")] = Field(alias="right")
    wrong_N: Annotated[np.ndarray, Packed("f4", "prompts")] = Field(alias="wrong")
    kept_at: Annotated[int, Field(ge=-1)]


class ThompsonSelector(StreamSelector):
    """Selector by Thompson sampling. Eight bytes per prompt and four for the order of the epoch."""

    state_model: ClassVar[type[State]] = ThompsonState

    def __init__(self, prompts: Sequence[Prompt], seed: int, options: Thompson, judge: GroupJudge) -> None:
        super().__init__(prompts, seed)
        self.options, self.judge = options, judge
        self.right_N = np.zeros(len(prompts), np.float32)
        self.wrong_N = np.zeros(len(prompts), np.float32)
        """Rollouts of each prompt; the prior, Beta(1, 1), is not counted."""
        self._predictions = Predictions(self.judge)
        self._passed = Verdict(False, f"thompson: the rate of another candidate was nearer to {options.target}")

    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        """Decide by whole sets of candidates, which begin at multiples of `candidates` in the epoch's order.

        The rest of the set of `kept_at` is skipped.
        """
        n = self.options.candidates
        start = self.visits % len(self.prompts)
        stop = start + len(ordinals_N)
        begun = self.visits - start
        keeps_N = np.zeros(len(ordinals_N), dtype=bool)
        first_set = start - start % n
        distance = self._distances(first_set, stop, epoch)
        sets_S = np.arange(first_set, stop, n)
        padded = np.full(len(sets_S) * n, np.inf)  # the epoch's last set may be shorter
        padded[: len(distance)] = distance[: len(padded)]
        padded[: start - first_set] = np.inf  # passed by an earlier call, when another was nearer
        chosen_S = sets_S + padded.reshape(-1, n).argmin(1)
        keeps_N[chosen_S[(chosen_S < stop) & (begun + sets_S > self.kept_at)] - start] = True
        return keeps_N

    def _distances(self, first: int, stop: int, epoch: int) -> np.ndarray:
        """Return how far drawn rates are from the target, from place `first` of the epoch's order to `stop` and the end
        of its block of sets. A block is always drawn as a whole, however much of it is asked for."""
        size = self.options.candidates * SETS
        drawn = []
        for block in range(first - first % size, stop, size):
            noise = np.random.default_rng((self.seed, SELECT_STREAM, epoch, block))
            prompts = self._order[block : block + size]
            drawn.append(noise.beta(1 + self.right_N[prompts], 1 + self.wrong_N[prompts]))
        distance: np.ndarray = np.abs(np.concatenate(drawn) - self.options.target)
        return distance[first % size :]

    def verdict_on(self, ordinal: int, keep: bool) -> Verdict:
        return KEEP if keep else self._passed

    def observe_group(self, group: Group) -> None:
        right, wrong = counts(group, self.judge)
        if right + wrong:
            ordinal, keep = group.prompt.ordinal, self.options.keep
            before = float(self.right_N[ordinal]), float(self.wrong_N[ordinal])
            self._predictions.add(group, 1 + before[0], 1 + before[1], self.probe)
            self.right_N[ordinal] = keep * before[0] + right
            self.wrong_N[ordinal] = keep * before[1] + wrong

    def end_step(self) -> None:
        super().end_step()
        self._predictions = Predictions(self.judge)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self._predictions.metrics("thompson")
