"""Short real runs of a configuration with a few changes, of which nothing is kept but work, seconds and pass@1."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.errors import ConfigError, ExpectedError
from ..config import HUB, RunConfig, validate
from ..learner.off_policy import log_ratios
from ..run.trainer import Trainer
from .costs import Recorder, Seen, Shape, Step, Work, add

LEAST_STEPS = 3
"""Fewest steps of a run."""
EVALUATIONS = 4
"""Evaluations of a run after the one at its start."""
TUNING_SEED = 1_000
"""Added to the seed, so that the run which follows is not tuned on its own draws."""
NOT_HERE = ("push_to_hub", *HUB, "report_to", "eval_steps", "metric_for_best_model", "greater_is_better")


@dataclass
class BriefRun:
    """A short real run."""

    changes: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)
    """Held-out pass@1 at equal intervals, from the start."""
    ratios_s: float = 0.0
    """Seconds of the importance ratios of some groups, which `reuse` computes, and the work of an update on them."""
    ratios_work: Work = field(default_factory=dict)
    slots: int = 1 << 30
    stopped: str = ""
    predicted: float | None = None
    """Mean seconds of its steps without the first, predicted before it ran."""

    @property
    def warm(self) -> list[Step]:
        """Steps without the first, in which kernels and the optimizer are set up."""
        return self.steps[1:]

    @property
    def per_step(self) -> float:
        return float(np.mean([sum(step.seconds.values()) for step in self.warm]))

    @property
    def per_signal(self) -> float:
        return self.per_step * len(self.warm) / max(1e-9, sum(step.signal for step in self.warm))

    @property
    def mean_passed(self) -> float:
        """Mean held-out pass@1 over the run."""
        return float(np.mean(self.passed)) if self.passed else math.nan

    def __str__(self) -> str:
        passed = f", mean held-out pass@1 {self.mean_passed:.3f}" if self.passed else ""
        predicted = "" if self.error is None else f", predicted {self.predicted:.3g} s ({self.error:+.0%})"
        return f"{len(self.steps)} steps of {self.per_step:.3g} s{predicted}{passed}"

    @property
    def error(self) -> float | None:
        """Relative error of the predicted seconds of a step."""
        return None if self.predicted is None or not self.warm else self.predicted / self.per_step - 1


@dataclass(frozen=True)
class Limits:
    """When a brief run ends: after `seconds` of training and `LEAST_STEPS`, or after `steps`."""

    seconds: float
    steps: int = 1 << 30
    measures: bool = False
    """Keep groups; otherwise evaluate at equal intervals."""


def run_briefly(c: RunConfig, run: BriefRun, output_dir: str, clock: Callable[[], float], limits: Limits) -> None:
    """Fill `run` with a run of `c` and its changes. `stopped`: an error of settings or files, which ends it."""
    own = {key: RunConfig.model_fields[key].default for key in NOT_HERE} | {"save_steps": 1 << 40}
    shutil.rmtree(output_dir, ignore_errors=True)  # of a call that was interrupted
    recorder = Recorder(clock)
    try:
        values = c.model_dump() | {"seed": c.seed + TUNING_SEED} | run.changes | own | {"output_dir": output_dir}
        trainer = Trainer(config=validate(values), callbacks=[recorder])
        try:
            _train(run, trainer, recorder, limits)
        finally:
            trainer.discard()
    except (ExpectedError, ValueError, OSError) as error:
        run.stopped = str(error)
    finally:
        shutil.rmtree(output_dir, ignore_errors=True)


def _train(run: BriefRun, trainer: Trainer, recorder: Recorder, limits: Limits) -> None:
    run.slots = getattr(getattr(trainer.engine, "options", None), "slots", run.slots)
    success, spent = trainer.methods.judge.success, 0.0
    if limits.measures:
        success.require()  # predictions need pass rates
    evaluate = bool(trainer.task.test) and not limits.measures and not success.undecided
    while True:
        if evaluate and spent >= limits.seconds * len(run.passed) / EVALUATIONS:
            if run.steps:  # or the evaluation would end what is in flight, off the clock
                started = recorder.clock()
                trainer.sampler.run([])
                run.steps[-1].seconds["generate"] += recorder.clock() - started
            evaluated = trainer.evaluate()
            if "eval/pass@1" not in evaluated:
                raise ConfigError("reward_funcs: no held-out rollout could be judged; see why with winnow eval")
            run.passed.append(evaluated["eval/pass@1"])
        done = len(run.steps)
        if done == min(limits.steps, trainer.config.max_steps) or (spent >= limits.seconds and done >= LEAST_STEPS):
            break
        step = recorder.observe(trainer)
        run.steps.append(step)
        spent += sum(step.seconds.values())
        for group in recorder.finished if limits.measures else []:
            right = [judged for r in group.siblings if (judged := success.right(r)) is not None]
            if len(right) == len(group.siblings):
                run.seen.append(Seen.of(group, right))
    if limits.measures and recorder.finished:
        started = recorder.clock()
        log_ratios(recorder.finished, trainer.learner)
        run.ratios_s = recorder.clock() - started
        for group in recorder.finished:
            add(run.ratios_work, Shape.of(group.siblings).trained(len(group.siblings)))
