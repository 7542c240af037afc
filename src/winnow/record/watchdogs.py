"""Failures that leave a run going: each is told from the metrics of a step, within two steps, and said once.

Real systems trained on through them for hours: a sampler that kept its initial weights after a resume, a tied head that
was never updated, a reward that was the same for everything, an evaluation that did not happen, a learning rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from ..base.files import from_json
from ..config import RunConfig
from .collapse import EssWatch

Metrics = Mapping[str, float]
GAP = "sampling/sampling_logp_difference/mean"
GROWN = 4
"""How many times the first step's difference of engine and learner is no rounding any more."""
SMALLEST_GAP = 1e-4
"""Differences under it are rounding in any case, nats a token."""
SAME_STEPS = 2
"""Steps in a row with one and the same reward for everything, or with no learning rate, before it is said."""
ROUNDING = 1e-9
"""A reward that never varies, such as 0.1, has a standard deviation of no more than this, relative to its size."""
NO_RATE = 1e-6
"""Share of the highest learning rate at which nothing is learned any more."""

MISSED = 0.3
"""Mean reward in excess of pass@1 from which right answers may be counted as wrong."""


class Watchdogs:
    """Looks at every step's metrics, and at probes of engine and learner.

    `first_gap`: the difference at the run's first step, of one that is resumed. `in_threads`: reward functions that run
    in a thread of this process.
    """

    def __init__(self, config: RunConfig, first_gap: float | None = None, in_threads: Collection[str] = ()) -> None:
        self._config = config
        self._in_threads = in_threads
        self._first_gap = first_gap
        self._ess = EssWatch()
        self._same: dict[str, tuple[float, int]] = {}
        """The one reward of each function, and for how many steps in a row; reported at `SAME_STEPS`, once."""
        self._constant: set[str] = set()
        """Reward functions already reported as constant."""
        self._still = 0
        """Steps in a row with a learning rate of next to nothing."""
        self._rules: list[Callable[[Metrics], str | None]] = [
            *(self._low_ess, self._old_weights, self._no_evaluation, self._no_learning),
            self._near_misses,
        ]

    def observe(self, row: Metrics) -> Iterator[str]:
        """Warnings that a row of metrics.jsonl gives rise to; each kind once, constant rewards once a function."""
        for rule in [*self._rules]:
            if (message := rule(row)) is not None:
                self._rules.remove(rule)
                yield message
        yield from self._one_reward(row)

    def probed(self, gap: float) -> str | None:
        """Engine and learner, compared by probes: at the start of this process, and after its first update."""
        message = self._grown(gap)
        if message is None or self._old_weights not in self._rules:
            return None
        self._rules.remove(self._old_weights)
        return message

    def _low_ess(self, row: Metrics) -> str | None:
        return self._ess.message if self._ess.observe(row) else None

    def _old_weights(self, row: Metrics) -> str | None:
        if GAP not in row or row.get("lag/max", 0) > 0 or self._config.num_iterations > 1:
            return None  # the policy has moved since the tokens were sampled, as it should
        if self._first_gap is None:
            self._first_gap = row[GAP]
        message = self._grown(row[GAP])
        if message and row.get("learning_rate") == 0:
            message += ". The learning rate is 0, so it cannot be the policy that has moved"
        return message

    def _grown(self, gap: float) -> str | None:
        if self._first_gap is None or gap <= max(GROWN * self._first_gap, SMALLEST_GAP):
            return None
        return (
            f"the engine does not sample from the learner's weights: the log-probabilities of fresh tokens differ by "
            f"{gap:.2g} nats on average, {self._first_gap:.2g} at the first step. It may have kept old ones (after a "
            "resume, or in a tied head that is not updated), or adapters are not merged"
        )

    def _one_reward(self, row: Metrics) -> Iterator[str]:
        for key in [key for key in row if key.startswith("rewards/") and key.endswith("/std")]:
            name = key.removeprefix("rewards/").removesuffix("/std")
            value, mean = row[key], row[f"rewards/{name}/mean"]
            before, steps = self._same.get(name, (mean, 0))
            rounding = ROUNDING * max(1.0, abs(mean))
            one, again = value <= rounding, abs(before - mean) <= rounding
            self._same[name] = (mean, steps + 1 if one and again else int(one))
            if self._same[name][1] >= SAME_STEPS and name not in self._constant:
                self._constant.add(name)
                message = (
                    f"the reward function '{name}' gave {mean:g} to every completion of {SAME_STEPS} steps in a row: "
                    "look at samples.jsonl, and whether it reads the columns and the completions that it means to"
                )
                causes = "; ".join(self._causes_of_zero(name, row)) if mean == 0 else ""
                yield f"{message}. Possible causes: {causes}" if causes else message

    def _causes_of_zero(self, name: str, row: Metrics) -> Iterator[str]:
        """Why a function may give 0 to every completion; the causes that the run's figures show come first."""
        c = self._config
        clipped = row.get("completions/clipped_ratio", 0.0)
        if clipped > 0:
            yield (
                f"{clipped:.0%} of the completions are cut off at max_completion_length ({c.max_completion_length}), "
                "perhaps before their answer"
            )
        if name in self._in_threads:
            yield (
                "it was given as an object and runs in a thread, where signals, which math-verify's timeouts need, do "
                "not work: give it by name, 'module:function' or 'file.py:function'"
            )
        if c.stop:
            yield f"completions end at a stop string ({', '.join(map(repr, c.stop))}), perhaps before their answer"
        yield "the prompt does not ask for the answer format that it looks for"

    def _no_evaluation(self, row: Metrics) -> str | None:
        every, step = self._config.eval_steps, row["step"]
        due = every and (step % every == 0 or step == self._config.max_steps)
        if not due or any(key.startswith("eval/") for key in row):
            return None
        return f"there was no evaluation at step {step:.0f}, where eval_steps={every} asks for one"

    def _no_learning(self, row: Metrics) -> str | None:
        nothing = NO_RATE * self._config.learning_rate
        self._still = self._still + 1 if row.get("learning_rate", math.inf) <= nothing > 0 else 0
        if self._still < SAME_STEPS:
            return None
        return (
            f"the learning rate is {row['learning_rate']:.2g} since step {row['step'] - SAME_STEPS + 1:.0f}, of "
            f"{self._config.learning_rate:g} at most: lr_scheduler_type={self._config.lr_scheduler_type} has ended the "
            "training before max_steps; see lr_scheduler_kwargs, lr_decay_steps and warmup_steps"
        )

    def _near_misses(self, row: Metrics) -> str | None:
        """Rewards that are high without being right, where a reward of 1 is right by default."""
        if self._config.success is not None or "eval/pass@1" not in row:
            return None
        reward, right = row["eval/avg@n"], row["eval/pass@1"]
        if reward - right < MISSED:
            return None
        return (
            f"held-out rewards average {reward:.2f}, but only {right:.0%} reach 1, which counts as right by default. "
            "If right answers get less (a penalty, partial credit), set `success: {at_least: X}`"
        )


def first_gap(metrics: Path) -> float | None:
    """Difference of engine and learner at the first step of a run that tells it, if there is one."""
    with metrics.open("rb") as lines:
        for line in lines:
            try:
                row = from_json(line)
            except ValueError:
                continue  # its damage is told elsewhere
            if GAP in row:
                return float(row[GAP])
    return None
