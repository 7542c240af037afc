"""Base of selectors: a stream of all prompts once per epoch, with some visits skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ...base.errors import ConfigError
from ...base.noise import noise_key, uniform_array
from ...base.state import Count, State
from ...types import KEEP, Group, Prompt, Verdict, Visit
from ..base import LearningMethod
from ..gate.audit import SkipAudit
from ..pass_rates import PassRate

SELECT_STREAM = 3
"""Separates the draws of selectors from other noise."""
LOOK_AHEAD = 256
"""Fewest visits decided at once."""
MAX_SKIPPED_IN_A_ROW = 10_000
"""Skipped visits in a row (or one whole epoch if that is more) after which nothing is left to roll out."""


class StreamState(State, extra="ignore"):  # subclasses have keys of their own
    visits: Count


class StreamSelector(LearningMethod):
    """Every prompt once per epoch, in an order that is a function of (seed, epoch) alone, or in that of `order_N`.

    A subclass overrides `keeps`, and `verdict_on` to give the reason; without them nothing is skipped.
    """

    state_model: ClassVar[type[State]] = StreamState

    def __init__(self, prompts: Sequence[Prompt], seed: int, *, order_N: np.ndarray | None = None) -> None:
        if not prompts:
            raise ValueError("there are no training prompts to select from")
        self.prompts = prompts
        self.seed = seed
        self._fixed_N = order_N
        self.probe: int | None = None
        """Siblings that every group has, where the others are rolled out later or never."""
        self.visits = 0
        self.kept_at = -1
        """Number of the last visit that the selector kept by itself, without an audit."""
        self.skipped = 0
        """Visits skipped since the last `end_step`."""
        self._order, self._order_epoch = self._order_of(0), 0

    @property
    def skips(self) -> bool:
        """Whether it may skip visits."""
        return type(self).keeps is not StreamSelector.keeps

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the order of all prompts in an epoch, int32 [N]."""
        if self._fixed_N is not None:
            return self._fixed_N
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.prompts)).astype(np.int32)

    @property
    def epoch(self) -> int:
        """The epoch of the next visit."""
        return self.visits // len(self.prompts)

    def select(self, n: int, audit: SkipAudit | None = None) -> list[Visit]:
        """Return the next visits in stream order: `n` to roll out, and the skipped ones between them.

        Skipped visits have `verdict.keep` False, unless `audit` overrides the skip. Returns fewer than `n` only if a
        whole epoch, and 10,000 visits, were skipped in a row. Costs array operations per visit checked and one object
        per visit passed.
        """
        visits: list[Visit] = []
        missing, in_a_row = n, 0
        while missing > 0 and in_a_row < max(MAX_SKIPPED_IN_A_ROW, len(self.prompts)):
            epoch, position = divmod(self.visits, len(self.prompts))
            if epoch != self._order_epoch:
                self._order, self._order_epoch = self._order_of(epoch), epoch
            ordinals = self._order[position : position + max(LOOK_AHEAD, 2 * missing)]
            own = np.asarray(self.keeps(ordinals, epoch))
            if own.dtype != bool or own.shape != ordinals.shape:
                raise ConfigError(
                    f"selector: {type(self).__name__}.keeps returned {own.dtype} {list(own.shape)}; return bool "
                    f"{list(ordinals.shape)}, one for each visit"
                )
            drawn = np.zeros_like(own) if audit is None else audit.overrides().draws(ordinals, epoch)
            keeps = own | drawn
            kept = np.flatnonzero(keeps)[:missing]
            passed = int(kept[-1]) + 1 if len(kept) == missing else len(ordinals)
            ordinals, own, drawn = ordinals[:passed], own[:passed], drawn[:passed]
            verdicts = self.verdicts(ordinals, own)
            if own.any():
                self.kept_at = self.visits + int(np.flatnonzero(own)[-1])
            if audit is not None:
                verdicts = [audit.decide(*each) for each in zip(verdicts, drawn.tolist(), strict=True)]
            for ordinal, verdict in zip(ordinals.tolist(), verdicts, strict=True):
                visits.append(Visit(self.visits, epoch, self.prompts[ordinal], verdict))
                self.visits += 1
            missing -= len(kept)
            self.skipped += passed - len(kept)
            in_a_row = 0 if len(kept) else in_a_row + passed
        return visits

    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        """Return bool [N]: which visits to roll out. A function of the state and of (seed, ordinal, epoch) only.

        It changes no state, since fewer visits may be taken than it decides about; `select` counts those.
        """
        return np.ones(len(ordinals_N), dtype=bool)

    def draws(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        """Return uniform random numbers [N], each a function of (seed, ordinal, epoch) alone."""
        return uniform_array(noise_key(self.seed, SELECT_STREAM, epoch), ordinals_N)

    def verdicts(self, ordinals_N: np.ndarray, keeps_N: np.ndarray) -> list[Verdict]:
        """Return the verdict on each visit, given what `keeps` returned for it."""
        return [self.verdict_on(*each) for each in zip(ordinals_N.tolist(), keeps_N.tolist(), strict=True)]

    def verdict_on(self, ordinal: int, keep: bool) -> Verdict:
        return KEEP if keep else Verdict(False, "skipped")

    def observe_group(self, group: Group) -> None:
        """Learn from a finished group; called for each, also for those that a filter drops later."""

    def wants_profile(self, step: int) -> int:
        """Return the rollouts per prompt of a pass-rate profile to make after `step` steps; 0: no profile."""
        return 0

    def profiled(self, rates: Iterable[PassRate]) -> int:
        """Receive the pass rates of a profile; return how many belong to its prompts."""
        return 0

    def end_step(self) -> None:
        """End an optimizer step; called after `metrics`."""
        self.skipped = 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step."""
        return {"epoch": self.visits / len(self.prompts), "select/skipped": float(self.skipped)}

    def axes(self) -> dict[str, int]:
        return {"prompts": len(self.prompts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._order, self._order_epoch = self._order_of(self.epoch), self.epoch
