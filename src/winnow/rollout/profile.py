"""Pass-rate profile: how often a policy solves each training prompt, measured by rolling it out n times.

`Profiler` needs nothing but what rolls out jobs; `winnow pass-rates` (`study/pass_rates.py`) writes its answers to a
file, and a trainer can ask it again with its own engine while it trains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..methods.pass_rates import PassRate, ProfileError, read_profile
from ..methods.success import Success
from ..types import Group, Job, Prompt, Visit
from .evaluate import RollOut, count_correct

__all__ = ["PassRate", "ProfileError", "Profiler", "read_profile"]

CHUNK = 64
"""Prompts that are rolled out together."""


class Profiler:
    """Rolls out prompts and counts what is right, with noise of its own, keyed by prompt.

    `rollouts`, `tokens` (sampled) and `seconds` (wall clock) say what it has cost since it was made; `unjudged` names
    the prompts of which no rollout could be judged, with the first cause.
    """

    def __init__(self, roll_out: RollOut) -> None:
        self.roll_out = roll_out
        self.rollouts = 0
        self.tokens = 0
        self.seconds = 0.0
        self.unjudged: dict[str, str] = {}

    def run(
        self, prompts: Sequence[Prompt], *, n: int = 16, success: Success | None = None, epoch: int = 0
    ) -> Iterator[PassRate]:
        """The pass rates of `prompts`, in their order, from `n` rollouts each; a prompt without judged rollouts is
        left out and named in `unjudged`. `success` says what counts as right; default: a reward of 1.

        Every `epoch` draws fresh noise, the same one whenever it is asked for: a refresh passes a number it has not
        used. Nothing of it is in flight while the caller has a result, so weights may change in between. Raises
        ValueError when `n` is below 1.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        for start in range(0, len(prompts), CHUNK):
            started = time.monotonic()
            chunk = prompts[start : start + CHUNK]
            groups = self.roll_out([Job(Visit(i, epoch, p), n, "profile") for i, p in enumerate(chunk)])
            self.rollouts += sum(len(g.rollouts) for g in groups)
            self.tokens += sum(int(r.action_mask.sum()) for g in groups for r in g.rollouts)
            self.seconds += time.monotonic() - started
            rates = [self._pass_rate(group, success or Success()) for group in groups]
            yield from (rate for rate in rates if rate is not None)

    def _pass_rate(self, group: Group, success: Success) -> PassRate | None:
        success.observe(group.rollouts)
        judged, correct = count_correct(group, success)
        if not judged:
            causes = [r.reason for r in group.rollouts if r.reason]
            self.unjudged[group.prompt.id] = causes[0] if causes else f"success is {success}"
            return None
        return PassRate(group.prompt.id, judged, correct, float(np.nanmean(group.rewards())))
