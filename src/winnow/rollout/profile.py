"""Pass-rate profile: how often a policy solves each training prompt, measured by rolling it out n times.

`Profiler` needs nothing but an engine and what judges; `winnow pass-rates` (`profile_run.py`) writes its answers to a
file, and a trainer can ask it again with its own engine while it trains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..engine.base import Engine, SamplingParams
from ..env.base import Task
from ..env.rewards.rewarder import Rewarder
from ..methods.pass_rates import PassRate, ProfileError, read_profile
from ..types import Group, Prompt
from .evaluate import count_correct, roll_out
from .runner import RolloutOptions, RolloutRunner

__all__ = ["PROFILE_STREAM", "PassRate", "ProfileError", "Profiler", "read_profile"]

PROFILE_STREAM = 2
"""Keeps the noise of a profile apart from that of training (0) and evaluation (1)."""
CHUNK = 64
"""Prompts that are rolled out together."""


class Profiler:
    """Rolls out prompts with an engine and counts what is right, with noise of its own, keyed by prompt.

    `rollouts`, `tokens` (sampled) and `seconds` (wall clock) say what it has cost since it was made; `unjudged` names
    the prompts of which no rollout could be judged, with the first cause.
    """

    def __init__(self, engine: Engine, task: Task, tokenizer: Any, rewarder: Rewarder, *, seed: int) -> None:
        self.engine = engine
        self.task = task
        self.tokenizer = tokenizer
        self.rewarder = rewarder
        self.seed = seed
        self.rollouts = 0
        self.tokens = 0
        self.seconds = 0.0
        self.unjudged: dict[str, str] = {}

    def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        n: int = 16,
        max_prompt_length: int,
        success_reward: float = 1.0,
        epoch: int = 0,
    ) -> Iterator[PassRate]:
        """The pass rates of `prompts`, in their order, from `n` rollouts each; a prompt without judged rollouts is
        left out and named in `unjudged`.

        Every `epoch` draws fresh noise, the same one whenever it is asked for: a refresh passes a number it has not
        used. Nothing is in flight while the caller has a result, so weights may change in between. Raises
        ValueError when `n` is below 1, RuntimeError when the engine is busy with other requests.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        options = RolloutOptions(params, max_prompt_length, self.seed, PROFILE_STREAM)
        for start in range(0, len(prompts), CHUNK):
            if self.engine.pending:
                raise RuntimeError(f"the engine is still busy with {self.engine.pending} other requests")
            started = time.monotonic()
            runner = RolloutRunner(self.engine, self.task, self.tokenizer, self.rewarder, options)
            groups = roll_out(runner, prompts[start : start + CHUNK], n, epoch)
            self.rollouts += sum(len(g.rollouts) for g in groups)
            self.tokens += sum(int(r.action_mask.sum()) for g in groups for r in g.rollouts)
            self.seconds += time.monotonic() - started
            rates = [self._pass_rate(group, success_reward) for group in groups]
            yield from (rate for rate in rates if rate is not None)

    def _pass_rate(self, group: Group, success_reward: float) -> PassRate | None:
        rewards_G = group.rewards()
        judged = rewards_G[~np.isnan(rewards_G)]
        if not len(judged):
            causes = [r.reason for r in group.rollouts if r.reason]
            self.unjudged[group.prompt.id] = causes[0] if causes else "no cause was given"
            return None
        return PassRate(group.prompt.id, len(judged), count_correct(judged, success_reward), float(judged.mean()))
