"""Skip prompts that a pass-rate profile marks as dead or solved (Active-RLOO's soft band), with optional refresh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from ...base.array_json import Packed
from ...config.options import CHECKED
from ...types import KEEP, Prompt, Verdict
from ..base import Chart, refuse_unused
from ..group_kind import BY_REWARDS, GroupJudge
from ..pass_rates import PassRate, read_profile
from .stream import StreamSelector, StreamState


@dataclass(frozen=True, config=CHECKED)
class PassRateBand:
    """Roll out only prompts whose profiled pass rate lies in [low, high] (Active-RLOO, section 4.1).

    `winnow pass-rates` makes the profile. Prompts missing from it stay in.
    """

    profile: str | None = None
    """JSONL file of `winnow pass-rates`; None: nothing is known before the first refresh."""
    low: float = 1e-9
    high: float = 1 - 1e-9
    refresh_steps: PositiveInt | None = None
    """Profile all training prompts again every so many optimizer steps, with the current policy."""
    n: PositiveInt = 16
    """Rollouts per prompt of a refresh."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"the band must satisfy 0 <= low <= high <= 1, not low={self.low}, high={self.high}")
        if self.profile is None and self.refresh_steps is None:
            raise ValueError("give profile, a file made by `winnow pass-rates`, or refresh_steps, or both")
        if self.refresh_steps is None:
            refuse_unused(self, ["n"], "without refresh_steps: the profile that is read has its own; remove it")

    def charts(self, name: str) -> list[Chart]:
        return [Chart("Prompts in the pass-rate band", {"pass_rate/in_band": "share"}, share=True, percent=True)]

    def build(self, prompts: Sequence[Prompt], seed: int, judge: GroupJudge = BY_REWARDS) -> PassRateSelector:
        """Build the selector. Raises ValueError when the profile cannot be read, is for other prompts, or leaves no
        prompt in the band, and when a refresh is set but right answers are unknown."""
        if self.refresh_steps is not None:
            judge.success.require("refresh_steps: counts right answers")
        selector = PassRateSelector(prompts, seed, self)
        if self.profile is not None:
            rates = read_profile(self.profile)
            known = selector.profiled(rates.values())
            if not known:
                raise ValueError(f"{self.profile}: none of its {len(rates)} prompts is in this task; profile this one")
            if not selector.in_band().any():
                raise ValueError(
                    f"{self.profile}: no prompt has a pass rate in [{self.low}, {self.high}]; widen the band"
                )
        return selector


class PassRateState(StreamState):
    rate_N: Annotated[np.ndarray, Packed("f8", "prompts", nan=True)] = Field(alias="rate")


class PassRateSelector(StreamSelector):
    """Selector by pass rate. Eight bytes per prompt for the rates and four for the order of the epoch."""

    state_model = PassRateState

    def __init__(self, prompts: Sequence[Prompt], seed: int, options: PassRateBand) -> None:
        super().__init__(prompts, seed)
        self.options = options
        self.rate_N = np.full(len(prompts), np.nan)
        """NaN: not profiled."""

    def in_band(self) -> np.ndarray:
        """bool [N]: prompts to roll out."""
        return self.keeps(np.arange(len(self.rate_N)), epoch=0)

    def wants_profile(self, step: int) -> int:
        every = self.options.refresh_steps
        return self.options.n if every and step % every == 0 else 0

    def profiled(self, rates: Iterable[PassRate]) -> int:
        given = {r.id: r.rate for r in rates}
        known = [(ordinal, given[prompt.id]) for ordinal, prompt in enumerate(self.prompts) if prompt.id in given]
        for ordinal, rate in known:
            self.rate_N[ordinal] = rate
        return len(known)

    def keeps(self, ordinals_N: np.ndarray, epoch: int) -> np.ndarray:
        rate_N, o = self.rate_N[ordinals_N], self.options
        return np.asarray(np.isnan(rate_N) | ((rate_N >= o.low) & (rate_N <= o.high)))

    def verdict_on(self, ordinal: int, keep: bool) -> Verdict:
        if keep:
            return KEEP
        rate = float(self.rate_N[ordinal])
        return Verdict(False, f"pass_rate: {rate:.3g}, outside [{self.options.low:g}, {self.options.high:g}]")

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"pass_rate/in_band": float(self.in_band().mean())}
