"""Rollout batches: how many groups to start when the training batch is not full.

`exact` starts one group for each missing one, at once, and never has a surplus. `fixed` and `adaptive` work in rounds,
like systems whose engine takes a batch at a time: fewer rounds, but some groups are surplus.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from ...config.options import CHECKED
from ..base import RunFacts
from ..select.greso import rollout_batch_size

Surplus = Literal["carry", "discard"]


@dataclass(frozen=True, config=CHECKED)
class Exact:
    """One group for each missing one, started at once."""

    def build(self, prompts_per_step: int) -> RolloutBatch:
        return RolloutBatch(prompts_per_step, carry=False)


@dataclass(frozen=True, config=CHECKED)
class FixedRounds:
    """Rounds of `size` groups until the batch is full, as DAPO's dynamic sampling is usually implemented."""

    size: PositiveInt | None = None
    """None: one and a half training batches (GRESO's setting: 384 for 256)."""
    surplus: Surplus = "carry"
    """`carry` keeps surplus groups for the next step, one step old by then; `discard` drops them."""

    def problems(self, run: RunFacts) -> Iterator[str]:
        yield from _problems(self.surplus, run)
        if run.config.reuse is not None:
            yield "with reuse a batch wants few new groups, and most of a fixed round is surplus; use adaptive or exact"

    def build(self, prompts_per_step: int) -> Rounds:
        return Rounds(_largest(self.size, prompts_per_step), self.surplus == "carry", None, prompts_per_step)


@dataclass(frozen=True, config=CHECKED)
class AdaptiveRounds:
    """GRESO's adaptive rollout batch (Zheng et al. 2025, eq. 6): rounds just large enough to fill the batch."""

    size: PositiveInt | None = None
    """Largest round; None: one and a half training batches."""
    safety: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.25
    surplus: Surplus = "carry"

    def problems(self, run: RunFacts) -> Iterator[str]:
        yield from _problems(self.surplus, run)

    def build(self, prompts_per_step: int) -> Rounds:
        return Rounds(_largest(self.size, prompts_per_step), self.surplus == "carry", self.safety, prompts_per_step)


def _problems(surplus: Surplus, run: RunFacts) -> Iterator[str]:
    if surplus == "carry" and run.config.max_lag < 1:
        yield (
            "surplus: carry trains groups one step after they were sampled; allow it with max_lag: 1, or choose "
            "surplus: discard"
        )
    if not any(filter_.refill for filter_ in run.filters):
        yield "it has an effect only with a filter that refills, e.g. filter: zero_variance; remove it"


def _largest(size: int | None, prompts_per_step: int) -> int:
    return size or -(-3 * prompts_per_step // 2)


@dataclass(frozen=True)
class RolloutBatch:
    """Decides how many groups to start at once while a batch is incomplete; by default one for each missing one."""

    size: int
    """Most groups in a round; without rounds, a batch's worth of groups counts as one."""
    carry: bool
    """Whether surplus groups wait for the next step; otherwise they are dropped."""

    def next(self, missing: int, in_flight: int, zero_variance_share: float | None) -> int:
        """Return the number of groups to start now, <= 0 for no start.

        `missing`: groups the batch still needs; `in_flight`: groups under way; `zero_variance_share`: of the groups
        judged in this step so far, None before the first.
        """
        return missing - in_flight


@dataclass(frozen=True)
class Rounds(RolloutBatch):
    """Rounds that start when the previous one is over; `safety` None is a fixed size.

    An adaptive round before the first judged group of its step has the full size (Algorithm 1 of GRESO). With groups
    carried from the last step, which the paper does not have, it is the missing share of that size.
    """

    safety: float | None
    prompts_per_step: int

    def next(self, missing: int, in_flight: int, zero_variance_share: float | None) -> int:
        if in_flight or missing <= 0:
            return 0
        if self.safety is None:
            return self.size
        if zero_variance_share is None:
            return -(-self.size * min(missing, self.prompts_per_step) // self.prompts_per_step)
        return rollout_batch_size(missing, zero_variance_share, self.size, self.safety)
