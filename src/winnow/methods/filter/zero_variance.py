"""Drop groups whose rewards are all equal: their group-relative advantages are all 0.

With `refill` this is DAPO's dynamic sampling (Yu et al. 2025, section 3.2): sampling goes on until the batch is full,
bounded by `max_refill_rounds`. Without it, the loss runs over the surviving groups only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...types import KEEP, Group, Verdict
from ..advantage import Advantage


def is_zero_variance(rewards_G: np.ndarray, atol: float = 1e-8) -> bool:
    """Whether all present rewards lie within `atol` of each other (largest minus smallest <= atol).

    float [G]; NaN members are absent. Tested on the rewards that the advantage uses, so with a format bonus a mix of
    0 and 0.1 is not zero-variance. No member present counts as zero-variance.
    """
    present = rewards_G[~np.isnan(rewards_G)]
    return len(present) == 0 or bool(present.max() - present.min() <= atol)


def zero_variance_kind(rewards_G: np.ndarray, max_reward: float = 1.0, atol: float = 1e-8) -> str | None:
    """`easy` (all at the maximum reward), `hard` (all equal below it), None when rewards differ or are absent."""
    present = rewards_G[~np.isnan(rewards_G)]
    if len(present) == 0 or not is_zero_variance(rewards_G, atol):
        return None
    return "easy" if present.min() >= max_reward - atol else "hard"


@dataclass(frozen=True)
class Judge:
    """Says of a finished group whether it teaches nothing: what selectors, filter and statistics of a run go by.

    With a group-relative `advantage` that is when every advantage is 0: all rewards equal within `atol`, or, under
    max@k, too few failures to matter. Other advantages (REINFORCE++, ReMax) are not asked, their groups always teach.
    """

    max_reward: float = 1.0
    atol: float = 1e-8
    advantage: Advantage | None = None
    """None: rewards alone decide."""

    def kind(self, group: Group) -> str | None:
        """`easy` (the best reward is the maximum) or `hard` for a group without signal.

        None for one that teaches, and for one with too few rewards to tell, which is no evidence of anything.
        """
        rewards_G = group.rewards()
        present = rewards_G[~np.isnan(rewards_G)]
        if len(present) < self.least:
            return None
        kind = zero_variance_kind(rewards_G, self.max_reward, self.atol)
        if kind is not None or self.advantage is None or not self.advantage.group_relative:
            return kind
        if np.nan_to_num(self.advantage.of_batch([group])[0]).any():
            return None
        return "easy" if present.max() >= self.max_reward - self.atol else "hard"

    @property
    def least(self) -> int:
        """Rewards that a group needs to be judged, and to be trained on."""
        return 2 if self.advantage is None else self.advantage.smallest_group


BY_REWARDS = Judge()


@dataclass(frozen=True)
class ZeroVariance:
    """Drop groups with equal rewards and sample others in their place (DAPO dynamic sampling, Yu et al. 2025)."""

    atol: float = 1e-8
    refill: bool = True
    max_refill_rounds: int = 10
    wants_signal = True

    def __post_init__(self) -> None:
        if self.atol < 0:
            raise ValueError(f"atol must be >= 0, not {self.atol}")
        if self.max_refill_rounds < 1:
            raise ValueError(f"max_refill_rounds must be >= 1, not {self.max_refill_rounds}")

    def admit(self, group: Group) -> Verdict:
        rewards_G = group.rewards()
        if not is_zero_variance(rewards_G, self.atol):
            return KEEP
        return Verdict(False, f"zero variance: all rewards are {rewards_G[~np.isnan(rewards_G)].mean():g}")
