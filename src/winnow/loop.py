"""The only loop: select, launch, take, update, publish. `max_lag = 0` is its synchronous mode.

    prompts -> select -> generate (gates) -> reward -> filter -> advantage -> correct -> update -> publish

Everything that is dispatched comes back once, with a fate; the ledger is told at dispatch and when the fate is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .base.failpoint import failpoint
from .base.typed import in_range, require_like, require_types
from .base.weights import FiniteWeights, RemoteWeights
from .config import ConfigError
from .learner.base import Learner
from .learner.step import OptimizerStep
from .methods.filter import Filter
from .methods.gate import Gate
from .methods.gate.audit import rules_of
from .methods.select import Selector
from .methods.signal import Judge
from .methods.size import GroupSize
from .record.failures import FailureWatch, cause_of
from .record.ledger import Ledger
from .record.stopping import Limits, RunStoppedError, Usefulness, memory_errors
from .record.tally import Tally
from .rollout.evaluate import Evaluation
from .sampler import Sampler, SamplersLostError
from .sampler.buffer import Buffer
from .sampler.codec import Prompts, group_from, group_state, visit_from, visit_state
from .sampler.pace import Pace
from .types import Fate, Group, Job, Purpose, Visit


@dataclass
class Parts:
    """Everything the loop drives. Each part can be used alone."""

    prompts: Mapping[Purpose, Prompts]
    sampler: Sampler
    learner: Learner
    selector: Selector
    group_size: GroupSize
    filter: Filter
    optimizer_step: OptimizerStep
    buffer: Buffer
    pace: Pace
    refill_round: int
    """Groups of one round of a filter that refills."""
    ledger: Ledger
    gates: dict[str, Gate] = field(default_factory=dict)
    """Gates by name."""


@dataclass
class Hooks:
    """Callbacks around a step: evaluation, records, checkpoints, display."""

    published: Callable[[int], None]
    """After the weights of an update went out. ConfigError ends the run: the engine does not do what it says."""
    evaluate: Callable[[int], Evaluation | None]
    profile: Callable[[int], None]
    record: Callable[[int, dict[str, float], list[Group]], None]
    save: Callable[[int, bool], None]
    """`save(step, force)`: on its own schedule, or now."""
    should_stop: Callable[[], bool]
    begin: Callable[[int], None] = lambda step: None
    """Before a step selects its prompts."""
    warn: Callable[[int, str], None] = lambda step, message: None
    """After a step is recorded: rollouts were lost, or the step trained nothing; once for each cause."""


class Batch(NamedTuple):
    """What an update is made of, and every group that finished while it was collected."""

    groups: list[Group]
    finished: list[Group]


class Loop:
    """Runs optimizer steps until `max_steps`. `step` is also the policy version: updates published so far."""

    def __init__(self, parts: Parts, hooks: Hooks, limits: Limits, judge: Judge) -> None:
        self.parts = parts
        self.hooks = hooks
        self.limits = limits
        self.judge = judge
        self.step = 0
        self.num_tokens = 0
        self._tally = Tally(judge)
        self._useful = Usefulness(judge, limits, parts.filter, parts.refill_round)
        self._failures = FailureWatch(parts.ledger.failures())
        self._untrained: set[str] = set()
        """Causes of steps that trained nothing, already reported."""
        self._nothing_left = False
        self._stop: RunStoppedError | None = None

    @property
    def stop(self) -> RunStoppedError | None:
        """Why the run cannot usefully go on, if it cannot."""
        return self._stop

    def run(self) -> None:
        """Train to `max_steps` or until `should_stop`; RunStoppedError, after saving, when going on is useless."""
        while self.step < self.limits.max_steps and not self.hooks.should_stop():
            self.advance()
        self.hooks.save(self.step, True)

    def advance(self) -> None:
        """One step, saved when it is due; RunStoppedError, after saving, when going on is useless."""
        with memory_errors(f"step {self.step}"):
            try:
                self.one_step()
            except SamplersLostError as error:
                self._stop = RunStoppedError(f"step {self.step}: {error}")
        if self._stop is not None:
            self.hooks.save(self.step, True)
            raise self._stop
        self.hooks.save(self.step, False)

    def one_step(self) -> None:
        """Collect a batch, update, publish, evaluate, record."""
        self.hooks.begin(self.step)
        batch = self.collect()
        if not batch.groups and self._stop is not None:
            return  # nothing to train on: the step has not taken place
        with self._tally.phase("update"):
            self.parts.sampler.make_room()
            update = self.parts.optimizer_step(batch.groups, self.step)
        self.complete(batch, update)

    def collect(self) -> Batch:
        """A batch for the next update; without groups when the run cannot go on."""
        self._tally = Tally(self.judge)
        with self._tally.phase("generate"):
            groups, finished = self._collect()
        if self._stop is not None and not groups:
            self.num_tokens += sum(self._tally.lengths)
        return Batch(groups, finished)

    def complete(self, batch: Batch, update: dict[str, float]) -> None:
        """Book a batch that was trained on, publish, evaluate, record. `update`: metrics, among them `updated`."""
        parts, tally = self.parts, self._tally
        groups, finished = batch
        self._book_trained(groups, bool(update["updated"]))
        useless = self._useful.of_step(self.step, groups, update, tally)
        untrained = self._useful.untrained(groups, update, tally)
        self._stop = self._stop or useless
        self.step += 1
        evaluation = None
        with tally.phase("publish"):
            gates = self._gates_learn()
        try:
            with tally.phase("publish"):
                self.publish()
                failpoint("publish")
                self.hooks.published(self.step)
            with tally.phase("evaluate"):
                evaluation = self.hooks.evaluate(self.step)
                self.hooks.profile(self.step)
        except (SamplersLostError, ConfigError) as error:  # the step has taken place; only its evaluation is missing
            self._stop = RunStoppedError(f"step {self.step}: {error}")
        metrics = self._metrics(update | gates, groups, evaluation)
        parts.group_size.observe(metrics)
        parts.selector.end_step()
        parts.ledger.step(self.step - 1, seconds=tally.seconds, metrics=metrics, version=self.step - 1)
        self.hooks.record(self.step, metrics, finished)
        self.warn_of_failures(finished, "rollouts")
        if evaluation is not None:
            self.warn_of_failures(evaluation.groups, "held-out rollouts")
        if untrained is not None and cause_of(untrained) not in self._untrained:
            self._untrained.add(cause_of(untrained))
            self.hooks.warn(self.step, f"the step trained nothing: {untrained}")

    def warn_of_failures(self, groups: Sequence[Group], what: str) -> None:
        """Report causes of failed rollouts that were not reported before; `what` they are."""
        for message in self._failures.observe(groups, what):
            self.hooks.warn(self.step, message)

    def publish(self) -> None:
        """Hand the newest weights and rules to the sampler. Raises FloatingPointError when a weight is not finite."""
        weights = self.parts.learner.weights()
        checked = weights if isinstance(weights, RemoteWeights) else FiniteWeights(weights)
        self.parts.sampler.publish(checked, rules_of(self.parts.gates), self.step)

    def _gates_learn(self) -> dict[str, float]:
        """End the step for the gates; their metrics until then."""
        metrics: dict[str, float] = {}
        for gate in self.parts.gates.values():
            metrics |= gate.metrics()
            gate.end_step()
        return metrics

    def _collect(self) -> tuple[list[Group], list[Group]]:
        """A batch for the next update, and every group that finished meanwhile."""
        parts, finished = self.parts, []
        self._useful.begin_step()
        self._nothing_left = False
        self._book_stale(parts.buffer.expire(self.step))
        while True:
            if self._stop is None:
                self._launch()
            if self._collected():
                break
            for group in parts.sampler.poll():
                finished.append(group)
                self._take(group)
        groups, stale, surplus = parts.buffer.take(self.step)
        self._book_stale(stale)
        for group in surplus:
            self._book(group, Fate.SURPLUS, "the batch was already full")
        return groups, finished

    def _collected(self) -> bool:
        """Whether to train now; a run that stops first takes what is in flight."""
        return self.parts.pace.ready(self.step) if self._stop is None else not self.parts.sampler.pending

    def _launch(self) -> None:
        parts, in_flight = self.parts, self.parts.sampler.pending
        n = parts.pace.room(self.step, self.limits.max_steps - self.step, self._tally.zero_share())
        if n <= 0 or (self._nothing_left and in_flight):
            return
        self._stop = self._useful.of_refill(self.step)
        if self._stop is not None:
            return
        visits = parts.selector.select(n)
        parts.ledger.visit(visits, step=self.step, version=parts.sampler.version)
        failpoint("launch")
        kept = [visit for visit in visits if visit.verdict.keep]
        for visit in kept:
            self._start(visit, parts.group_size.next())
        self._nothing_left = len(kept) < n
        if not kept and not in_flight:
            reason = next((v.verdict.reason for v in reversed(visits)), "")
            self._stop = RunStoppedError(
                f"step {self.step}: the selector skipped the last {len(visits):,} visits, more than a whole epoch, so "
                f"nothing is left to roll out (last reason: {reason}). The prompts are too easy or too hard for this "
                "policy: use other prompts, or selector: uniform"
            )

    def _start(self, visit: Visit, size: int) -> None:
        self.parts.buffer.launched(visit, size, self.parts.sampler.version)
        self.parts.sampler.launch(Job(visit, size))

    def _take(self, group: Group) -> None:
        """Observe before admitting: every finished group teaches the selector, also those a filter then drops."""
        parts = self.parts
        parts.buffer.landed(group)
        self.judge.success.observe(group.rollouts)
        for gate in parts.gates.values():
            gate.observe(group)
        self._tally.finished(group)
        parts.selector.observe(group)
        failpoint("take")
        self._stop = self._stop or self._useful.of_failures(self.step, self._tally, parts.buffer.prompts_per_step)
        reason = refusal = self.judge.refusal(group)
        if reason is None:
            verdict = parts.filter.admit(group, self.judge.kind(group))
            if verdict.keep:
                parts.buffer.add(group)
                self._useful.accepted()
                return
            reason = verdict.reason
        elif group.verdict.keep:
            self._tally.refused[reason] += 1
        self._book(group, Fate.FILTERED, reason)
        if parts.filter.refill:
            self._useful.rejected(group, reason, refusal)
        else:
            parts.buffer.spend()

    def _book_stale(self, groups: list[Group]) -> None:
        for group in groups:
            self._book(group, Fate.STALE, f"older than max_lag={self.parts.buffer.max_lag} steps")

    def close(self) -> None:
        """At the end of the run, after the last save: what was carried or is in flight will never be trained."""
        for group in self.parts.buffer.groups:
            self._book(group, Fate.SURPLUS, "carried, but the run is over")
        for group in self.parts.sampler.close():
            self._book(group, Fate.SURPLUS, "in flight when the run was over")
        self.parts.buffer.clear()

    def _book_trained(self, groups: list[Group], updated: bool) -> None:
        for group in groups:
            if updated:
                self._book(group, Fate.TRAINED, "")
            else:
                self._book(group, Fate.FILTERED, "no group of the batch had a signal; the optimizer step was skipped")
        failpoint("trained")

    def _book(self, group: Group, fate: Fate, reason: str) -> None:
        """Give every rollout that has none a fate, and close the group's account."""
        for rollout in group.rollouts:
            if rollout.fate is None:
                rollout.fate, rollout.reason = fate, reason
        self.parts.ledger.finish(group, step=self.step)
        self._tally.fated(group)

    def _metrics(
        self, update: dict[str, float], groups: list[Group], evaluation: Evaluation | None
    ) -> dict[str, float]:
        metrics = self._tally.metrics()
        self.num_tokens += self._tally.sampled_tokens
        metrics |= {"step": self.step, "num_tokens": self.num_tokens, "groups/effective": float(len(groups))}
        metrics |= update | self.parts.selector.metrics() | self.parts.sampler.metrics() | self.parts.learner.metrics()
        if "learning_rate" in update:  # what plain SGD over all prompts_per_step groups would need (Active-RLOO, eq. 4)
            metrics["eta_eff"] = update["effective_learning_rate"] * self.parts.buffer.prompts_per_step / len(groups)
        if evaluation is not None:
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything of the loop that a checkpoint must hold besides weights, optimizer and ledger."""
        parts = self.parts
        if not parts.pace.settled():
            raise RuntimeError("a checkpoint is only taken between steps, when nothing is in flight")
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "skipped_steps": self._useful.skipped_steps,
            "solved_steps": self._useful.solved_steps,
            "undecided": self.judge.success.undecided,
            "waiting": [group_state(group) for group in parts.buffer.groups],
            "spent": parts.buffer.spent,
            "in_flight": [[visit_state(flight.visit), flight.size] for flight in parts.buffer.in_flight],
        } | self._state_of_parts()

    def _state_of_parts(self) -> dict[str, Any]:
        parts = self.parts
        return {
            "selector": parts.selector.state_dict(),
            "group_size": parts.group_size.state_dict(),
            "gates": {name: gate.state_dict() for name, gate in parts.gates.items()},
            "step_scale": parts.optimizer_step.scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError on a state that no run of this configuration has had."""
        require_like(state, self._state_of_parts(), "loop")
        self.step = int(state["step"])
        self.num_tokens = int(state["num_tokens"])
        self._useful.skipped_steps = int(state["skipped_steps"])
        self._useful.solved_steps = int(state.get("solved_steps", 0))
        if not self.judge.success.declared:
            self.judge.success.undecided = self.judge.success.undecided or str(state.get("undecided", ""))
        for waiting in state["waiting"]:
            group = group_from(waiting, self.parts.prompts)
            require_types(group)
            _require_trainable(group, self.step)
            self.parts.buffer.add(group)
        self.parts.buffer.spent = int(state["spent"])
        self.parts.selector.load_state_dict(state["selector"])
        self.parts.group_size.load_state_dict(state["group_size"])
        for name, gate in self.parts.gates.items():
            gate.load_state_dict(state["gates"][name])
        self.parts.optimizer_step.scale.load_state_dict(state["step_scale"])

    def relaunch(self, state: dict[str, Any]) -> None:
        """Roll out again what was in flight when `state` was taken; it stays booked as dispatched."""
        for visit, size in state["in_flight"]:
            again = visit_from(visit, self.parts.prompts["train"])
            require_types(again)
            self._start(again, int(in_range(size, 1, self.parts.group_size.largest, "size")))


def _require_trainable(group: Group, step: int) -> None:
    """Raises ValueError for a group that cannot have waited for optimizer step `step`."""
    where = f"visit {group.visit.number}"
    if not group.rollouts:
        raise ValueError(f"{where} waits without rollouts")
    for rollout in group.rollouts:
        versions = rollout.versions[rollout.action_mask]
        if not ((versions >= 0) & (versions <= step)).all():
            raise ValueError(f"{where}: tokens of a policy that step {step} does not know")
        if not np.isfinite(rollout.sampler_logp).all():
            raise ValueError(f"{where}: log-probabilities that are not finite")
        if not 0 < rollout.survival_p <= 1 + 1e-9:
            raise ValueError(f"{where}: survived with the chance {rollout.survival_p}")
