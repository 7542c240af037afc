"""Pass-rate profile: how often a policy solves each training prompt, measured over n rollouts.

`Profiler` needs only a function that runs jobs. `winnow pass-rates` (`study/pass_rates.py`) writes its results to a
file, and a trainer can refresh them with its own engine during training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..methods.pass_rates import PassRate
from ..methods.success import Success
from ..types import Group, Job, Prompt, Visit
from .evaluate import RollOut, count_correct

CHUNK = 64
"""Prompts rolled out together."""


class Profiler:
    """Rolls out prompts and counts right answers, with a separate noise stream keyed by prompt.

    `rollouts`, `tokens` (sampled) and `seconds` (wall clock) are its cost. `unjudged` has the first cause of each
    prompt without a judged rollout.
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
        """Yield the pass rates of `prompts` in order, from `n` rollouts each. A prompt without judged rollouts goes to
        `unjudged` instead. `success` decides what counts as right; default: a reward of 1. Ends where rewards show that
        right answers are unknown.

        Noise depends on `epoch`: a refresh passes an unused number. Nothing is in flight while the caller has a result,
        so weights may change in between. Raises ValueError when `n` is below 1.
        """
        if n < 1:
            raise ValueError(f"n: must be at least 1 ({n})")
        success = success or Success()
        for start in range(0, len(prompts), CHUNK):
            started = time.monotonic()
            chunk = prompts[start : start + CHUNK]
            groups = self.roll_out([Job(Visit(i, epoch, p), n, "profile") for i, p in enumerate(chunk)])
            self.rollouts += sum(len(g.rollouts) for g in groups)
            self.tokens += sum(int(r.action_mask.sum()) for g in groups for r in g.rollouts)
            self.seconds += time.monotonic() - started
            rates = [self._pass_rate(group, success) for group in groups]
            yield from (rate for rate in rates if rate is not None)
            if success.undecided:
                return

    def _pass_rate(self, group: Group, success: Success) -> PassRate | None:
        success.observe(group.rollouts)
        judged, correct = count_correct(group, success)
        if not judged:
            causes = [r.reason for r in group.rollouts if r.reason]
            self.unjudged[group.prompt.id] = causes[0] if causes else f"success is {success}"
            return None
        return PassRate(group.prompt.id, judged, correct, float(np.nanmean(group.rewards())))
