"""The training loop: collect, update, publish, evaluate, record. `max_lag = 0` is its synchronous mode.

prompts -> select -> generate (gates) -> reward -> filter -> advantage -> correct -> update -> publish
'--------------- collect.py (rollout/, env/rewards/) -------' '---- learner/step.py --------'

With `overlap` the batch after this one is collected while the update runs, with the weights before it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from .base.errors import ConfigError
from .base.failpoint import failpoint
from .base.state import at
from .base.weights import FiniteWeights, RemoteWeights
from .collect import Batch, Collector, LoopState
from .learner.base import Learner
from .learner.step import OptimizerStep
from .methods.gate.audit import rules_of
from .record.stop_conditions import RunStoppedError, memory_errors
from .rollout.evaluate import Evaluation
from .sampler import Sampler, SamplersLostError
from .types import Group


@dataclass
class Hooks:
    """Callbacks around a step: evaluation, records, checkpoints, display."""

    published: Callable[[int], None]
    """After an update's weights are published. ConfigError ends the run: engine and learner do not agree."""
    evaluate: Callable[[int], Evaluation | None]
    profile: Callable[[int], None]
    record: Callable[[int, dict[str, float], list[Group]], None]
    save: Callable[[int, bool], None]
    """`save(step, force)`: on its own schedule, or now."""
    should_stop: Callable[[], bool]
    pauses: Callable[[int], bool] = lambda step: False
    """Whether nothing may be in flight after so many steps, as a checkpoint or an evaluation is due then."""
    begin: Callable[[int], None] = lambda step: None
    """Before a step selects its prompts."""
    warn: Callable[[int, str], None] = lambda step, message: None
    """After a step is recorded: rollouts failed, or the step trained nothing. Once for each cause."""


@dataclass
class Loop:
    """Runs optimizer steps until `max_steps`."""

    collector: Collector
    sampler: Sampler
    learner: Learner
    optimizer_step: OptimizerStep
    hooks: Hooks
    overlap: bool = False
    """Whether the next batch is collected while the update runs."""
    step: int = 0
    """Updates published so far, which is also the policy version."""

    def __post_init__(self) -> None:
        self._updates = ThreadPoolExecutor(1, "update", torch.set_num_threads, (torch.get_num_threads(),))
        """Runs the updates if they overlap; its thread starts with the first."""
        self._ended = False
        """Whether the run ends for what is not the batch's fault, so that no waiting batch is trained."""

    def run(self) -> None:
        """Train to `max_steps` or `should_stop`. Raises RunStoppedError, after saving, when no progress is possible."""
        while self.step < self.collector.limits.max_steps and not self.hooks.should_stop():
            self.advance()
        self.hooks.save(self.step, True)

    def advance(self) -> None:
        """Run one step; save if due. Raises RunStoppedError, after saving, when no progress is possible."""
        with memory_errors(f"step {self.step}"):
            step, before = self.step, self.collector.tally
            try:
                self.one_step()
            except SamplersLostError as error:
                if self.step == step and self.collector.tally is not before:  # a step that did not take place
                    self.collector.totals = self.collector.totals.with_step(self.collector.tally)
                self._stop(error)
        if self.collector.stop is not None and not self._has_more():
            self.hooks.save(self.step, True)
            raise self.collector.stop
        with self.collector.clock.phase("record"):
            self.hooks.save(self.step, False)

    def one_step(self) -> None:
        """Collect a batch, update, publish, evaluate, record."""
        self.hooks.begin(self.step)
        land = self.hooks.pauses(self.step + 1)
        batch = self.collector.collect(self.step, land=land and not self.overlap)
        if not batch.groups and self.collector.stop is not None:
            return  # nothing to train on: this is not a step
        update = self._update_meanwhile(batch, land) if self.overlap else self._update(batch)
        self._complete(batch, update)

    def _update(self, batch: Batch) -> dict[str, float]:
        with self.collector.clock.phase("update"):
            self.sampler.make_room()
            return self.optimizer_step(batch.trained_on, self.step)

    def _update_meanwhile(self, batch: Batch, land: bool) -> dict[str, float]:
        """Update in a thread and collect the next batch meanwhile, also after a stop request: a checkpoint has it."""
        clock = self.collector.clock
        update = self._updates.submit(self.optimizer_step, batch.trained_on, self.step)
        try:
            if self.step + 1 < self.collector.limits.max_steps:
                batch.finished.extend(self.collector.fill(self.step, ahead=True, land=land))
        finally:
            with clock.phase("update"):
                wait([update])
        return update.result()

    def _has_more(self) -> bool:
        """Return whether a run that stops has collected groups that it still trains."""
        more = self.overlap and not self._ended and bool(self.collector.buffer.groups)
        return more and self.step < self.collector.limits.max_steps

    def _complete(self, batch: Batch, update: dict[str, float]) -> None:
        collector, clock = self.collector, self.collector.clock
        with clock.phase("record"):
            collector.trained(self.step, batch, update)
        self.step += 1
        evaluation = None
        try:
            with clock.phase("publish"):
                self.publish()
                failpoint("publish")
                self.hooks.published(self.step)
            with clock.phase("evaluate"):
                evaluation = self.hooks.evaluate(self.step)
                self.hooks.profile(self.step)
        except (SamplersLostError, ConfigError) as error:  # the step is done; only its evaluation is missing
            self._stop(error)
        evaluated = {} if evaluation is None else {f"eval/{name}": x for name, x in evaluation.metrics.items()}
        elsewhere = update | self.learner.metrics()
        if self.overlap:
            elsewhere = {name.replace("seconds/", "seconds_overlapped/", 1): value for name, value in elsewhere.items()}
        elsewhere = self.sampler.metrics() | elsewhere | evaluated
        metrics = collector.end_step(self.step - 1, batch.trained_on, elsewhere)
        with clock.phase("record"):
            self.hooks.record(self.step, metrics, batch.finished)
            for message in collector.warnings(batch.finished):
                self.hooks.warn(self.step, message)
            if evaluation is not None:
                self.warn_of_evaluation(evaluation)

    def publish(self) -> None:
        """Send the newest weights and rules to the sampler. Raises FloatingPointError on a non-finite weight."""
        weights = self.learner.weights()
        checked = weights if isinstance(weights, RemoteWeights) else FiniteWeights(weights)
        self.sampler.publish(checked, rules_of(self.collector.gates, self.collector.audits), self.step)

    def warn_of_evaluation(self, evaluation: Evaluation) -> None:
        """Report new causes of failed held-out rollouts."""
        for message in self.collector.failures.observe(evaluation.groups, "held-out rollouts"):
            self.hooks.warn(self.step, message)

    def close(self) -> None:
        """Close the account at the end of the run, after the last save."""
        self._updates.shutdown()
        self.collector.close(self.step, self.sampler.close())

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state other than weights, optimizer and ledger."""
        return {"step": self.step, "step_scale": self.optimizer_step.scale.state_dict()} | self.collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises ValueError on one that this configuration cannot have."""
        saved = LoopState.of(state)
        self.step = saved.step
        self.collector.load_state_dict(saved)
        with at("step_scale"):
            self.optimizer_step.scale.load_state_dict(saved.step_scale)

    def _stop(self, error: Exception) -> None:
        self._ended = True
        self.collector.stop = RunStoppedError(f"step {self.step}: {error}")
