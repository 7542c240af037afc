"""The only loop: select, launch, take, update, publish. `max_lag = 0` is its synchronous mode.

    prompts -> select -> generate (gates) -> reward -> filter -> advantage -> correct -> update -> publish

Everything that is dispatched comes back once, with a fate; the ledger is told at dispatch and when the fate is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .buffer import Buffer
from .engine.base import Engine
from .evaluate import Evaluation
from .failpoint import failpoint
from .filter import Filter
from .gate import Gate
from .learner.base import Learner
from .ledger import Ledger
from .rollout import RolloutRunner
from .select import Selector
from .size import GroupSize
from .step import OptimizerStep
from .tally import Tally
from .types import Fate, Group

MIN_FAILURES_JUDGED = 32
"""Rollouts of a step that must have come back before their failed share can stop the run."""


class RunStoppedError(RuntimeError):
    """The run cannot usefully go on; the message says why and what to do. What was reached is saved."""


@dataclass
class Parts:
    """Everything the loop drives. Each part can be used alone."""

    engine: Engine
    learner: Learner
    runner: RolloutRunner
    selector: Selector
    group_size: GroupSize
    filter: Filter
    optimizer_step: OptimizerStep
    buffer: Buffer
    ledger: Ledger
    gates: list[Gate] = field(default_factory=list)


@dataclass
class Hooks:
    """What surrounds a step: evaluation, records, checkpoints, display."""

    evaluate: Callable[[int], Evaluation | None]
    record: Callable[[int, dict[str, float], list[Group]], None]
    save: Callable[[int, bool], None]
    """`save(step, force)`: on its own schedule, or now."""
    should_stop: Callable[[], bool]


class Loop:
    """Runs optimizer steps until `max_steps`. `step` is also the policy version: updates published so far."""

    def __init__(
        self, parts: Parts, hooks: Hooks, *, max_steps: int, max_failed_share: float, success_reward: float
    ) -> None:
        self.parts = parts
        self.hooks = hooks
        self.max_steps = max_steps
        self.max_failed_share = max_failed_share
        self.success_reward = success_reward
        self.step = 0
        self.num_tokens = 0
        self._tally = Tally(success_reward)
        self._barren = 0
        self._last_rejected: list[str] = []
        self._stop: RunStoppedError | None = None

    def run(self) -> None:
        """Train to `max_steps` or until `should_stop`; RunStoppedError, after saving, when going on is useless."""
        while self.step < self.max_steps and not self.hooks.should_stop():
            self.one_step()
            if self._stop is not None:
                self.hooks.save(self.step, True)
                raise self._stop
            self.hooks.save(self.step, False)
        self.hooks.save(self.step, True)

    def one_step(self) -> None:
        """Collect a batch, update, publish, evaluate, record."""
        parts, tally = self.parts, Tally(self.success_reward)
        self._tally = tally
        with tally.phase("generate"):
            groups, finished = self._collect()
        if self._stop is not None and not groups:
            return  # nothing to train on: the step has not taken place
        with tally.phase("update"):
            update = parts.optimizer_step(groups, self.step)
        self._book_trained(groups, bool(update["updated"]))
        self.step += 1
        with tally.phase("publish"):
            parts.engine.load_weights(parts.learner.weights(), self.step)
            failpoint("publish")
        with tally.phase("evaluate"):
            evaluation = self.hooks.evaluate(self.step)
        metrics = self._metrics(update, groups, evaluation)
        parts.group_size.observe(metrics)
        parts.ledger.step(self.step - 1, seconds=tally.seconds, metrics=metrics, version=self.step - 1)
        self.hooks.record(self.step, metrics, finished)

    def _collect(self) -> tuple[list[Group], list[Group]]:
        """A batch for the next update, and every group that finished meanwhile."""
        parts, finished = self.parts, []
        self._barren = 0
        self._last_rejected = []
        while not parts.buffer.ready and not (self._stop and parts.runner.pending == 0):
            if self._stop is None:
                self._launch()
            for group in parts.runner.poll():
                finished.append(group)
                self._take(group)
        groups, stale = parts.buffer.take(self.step)
        for group in stale:
            self._book(group, Fate.STALE, f"older than max_lag={parts.buffer.max_lag} steps")
        return groups, finished

    def _launch(self) -> None:
        """Start as many groups as may still be trained within the lag bound."""
        parts = self.parts
        room = parts.buffer.room(parts.runner.pending)
        if room <= 0:
            return
        visits = parts.selector.select(room)
        parts.ledger.visit(visits, step=self.step, version=self.step)
        failpoint("launch")
        for visit in visits:
            if visit.verdict.keep:
                parts.runner.launch(visit, parts.group_size.next())

    def _take(self, group: Group) -> None:
        """Observe before admitting: every finished group teaches the selector, also those a filter then drops."""
        parts = self.parts
        self._tally.finished(group)
        parts.selector.observe(group)
        failpoint("take")
        self._judge_failures()
        if group.verdict.keep and (refused := _too_few(group)) is None:
            verdict = parts.filter.admit(group)
            if verdict.keep:
                parts.buffer.add(group)
                self._barren = 0
                return
            self._book(group, Fate.FILTERED, verdict.reason)
        else:
            self._book(group, Fate.FILTERED, group.verdict.reason if not group.verdict.keep else str(refused))
        if parts.filter.refill:
            self._count_barren(group)
        else:
            parts.buffer.spend()

    def _count_barren(self, group: Group) -> None:
        """Stop a refill that adds nothing; what was already accepted is still trained."""
        self._barren += 1
        reason = next((r.reason for r in group.rollouts if r.reason), "")
        self._last_rejected.append(f"{group.prompt.id} ({reason})")
        limit = self.parts.filter.max_refill_rounds * self.parts.buffer.prompts_per_step
        if self._stop is None and self._barren >= limit:
            self._stop = RunStoppedError(
                f"step {self.step}: {self._barren} groups in a row had no signal, so the batch cannot be filled; "
                f"the last were: {'; '.join(self._last_rejected[-5:])}. The prompts are too easy or "
                "too hard for this policy: use other prompts, more num_generations, or filter: keep_all"
            )

    def _judge_failures(self) -> None:
        tally = self._tally
        enough = sum(tally.sizes) >= MIN_FAILURES_JUDGED or tally.groups >= self.parts.buffer.prompts_per_step
        if self._stop is None and enough and tally.failed_share() > self.max_failed_share:
            cause, count = tally.failed.most_common(1)[0]
            self._stop = RunStoppedError(
                f"step {self.step}: {tally.failed_share():.0%} of the rollouts failed (max_failed_share="
                f"{self.max_failed_share:.0%}); most often ({count}x): {cause}"
            )

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
        self.num_tokens += sum(self._tally.lengths)
        metrics |= {"step": self.step, "num_tokens": self.num_tokens, "groups/effective": float(len(groups))}
        metrics |= update | self.parts.selector.metrics()
        if evaluation is not None:
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything of the loop that a checkpoint must hold besides weights, optimizer and ledger."""
        parts = self.parts
        if parts.runner.pending or parts.buffer.groups:
            raise RuntimeError("a checkpoint is only taken between steps, when nothing is in flight")
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "selector": parts.selector.state_dict(),
            "group_size": parts.group_size.state_dict(),
            "gates": [gate.state_dict() for gate in parts.gates],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.num_tokens = int(state["num_tokens"])
        self.parts.selector.load_state_dict(state["selector"])
        self.parts.group_size.load_state_dict(state["group_size"])
        for gate, gate_state in zip(self.parts.gates, state["gates"], strict=True):
            gate.load_state_dict(gate_state)


def _too_few(group: Group) -> str | None:
    """A group-relative advantage needs two members with a reward."""
    survivors = sum(r.reward is not None for r in group.rollouts)
    return None if survivors >= 2 else f"only {survivors} of {len(group.rollouts)} siblings have a reward"
