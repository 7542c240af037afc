"""Collect batches: select prompts, launch groups, judge, filter, buffer and book the finished ones.

    select -> launch -> (sampler, gates, rewards) -> take -> judge -> filter -> buffer -> batch -> trained
                                                                        |          |
                                                                     filtered   stale, surplus

Every launched group returns once, and each of its rollouts leaves with one fate; the ledger books both. A collector
knows policy versions and steps as numbers, but no learner, weights or evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field, PositiveInt, TypeAdapter

from .base.failpoint import failpoint
from .base.seconds import RunClock
from .base.state import STRICT, Count, Loose, at
from .methods.agents import filter_without_row
from .methods.filter import Filter, checked_verdict
from .methods.gate import Gate
from .methods.gate.audit import Audits, load_with_audit, state_with_audit
from .methods.group_kind import GroupJudge
from .methods.select import StreamSelector
from .methods.size import GroupSize, checked_additional_size, checked_size
from .record.account import Account
from .record.failures import FailureWatch, cause_of
from .record.step_metrics import Tally, TokenTotals
from .record.stop_conditions import Limits, RunStoppedError, StopConditions, StopCounts, nothing_left
from .reuse import Reuse, UsedState
from .rollout.in_flight import zero_unrewarded_truncated
from .sampler.base import GroupSource
from .sampler.buffer import Buffer, oldest_version
from .sampler.codec import Prompts, group_state, saved_groups, visit_from, visit_state
from .sampler.drafts import Drafts, DraftsState
from .sampler.scheduling import Pace
from .types import Fate, Group, Purpose, Visit


class Batch(NamedTuple):
    groups: list[Group]
    """New groups to train on."""
    finished: list[Group]
    """Every group that finished while the batch was collected."""
    again: Sequence[Group] = ()
    """Groups that were trained before and join the update."""

    @property
    def trained_on(self) -> list[Group]:
        return [*self.groups, *self.again]


class CollectorState(StopCounts, TokenTotals):
    undecided: str
    waiting: list[dict[str, Any]]
    unreplaced: Count
    in_flight: list[Annotated[tuple[list[Any], PositiveInt], Loose]]
    polled: list[Count] = Field(default_factory=list)  # absent before continuous rollouts
    probes: list[dict[str, Any]]
    selector: dict[str, Any]
    group_size: dict[str, Any]
    filter: dict[str, Any]
    gates: dict[str, dict[str, Any]]
    reuse: list[UsedState] | None
    """None without `reuse`."""
    drafts: DraftsState


class LoopState(CollectorState):
    """State of the loop: the collector's, its step and its step size."""

    step: Count
    step_scale: dict[str, Any]


_VISITS: TypeAdapter[list[Visit]] = TypeAdapter(list[Visit], config=STRICT)


@dataclass
class Collector:
    """Collects a batch for each optimizer step and keeps the account of every rollout."""

    prompts: Mapping[Purpose, Prompts]
    sampler: GroupSource
    selector: StreamSelector
    group_size: GroupSize
    filter: Filter
    buffer: Buffer
    pace: Pace
    refill_round: int
    """Groups in one round of a filter that refills."""
    ledger: Account
    judge: GroupJudge
    limits: Limits
    gates: dict[str, Gate] = field(default_factory=dict)
    audits: Audits = field(default_factory=Audits)
    reuse: Reuse | None = None
    drafts: Drafts = field(default_factory=Drafts)
    clock: RunClock = field(default_factory=RunClock)
    """Seconds of the current step, and of recording the one before."""

    def __post_init__(self) -> None:
        self.totals = TokenTotals(num_tokens=0, num_decoded_tokens=0, num_computed_tokens=0)
        self.stop: RunStoppedError | None = None
        """Error that ends the run, once no progress is possible."""
        self.tally = Tally(self.judge)
        """Counts of the current step."""
        self.failures = FailureWatch(self.ledger.failures(), self.judge.success)
        self._stop_conditions = StopConditions(self.judge, self.limits, self.filter, self.refill_round)
        self._method_metrics: dict[str, float] = {}
        """Metrics of gates, audits and filter."""
        self._untrained: str | None = None
        """Why the current step trained nothing."""
        self._reported: set[str] = set()
        """Reported causes of steps that trained nothing."""
        self._exhausted = False
        self._probes: dict[int, Group] = {}
        """Finished siblings of groups whose others are in flight, by visit."""
        if self.reuse is not None:
            self.buffer.fewest = self.reuse.fewest_fresh

    # ---- one step ------------------------------------------------------------------------------------------------

    def collect(self, step: int, *, land: bool = False) -> Batch:
        """Return the batch for the optimizer step from version `step`; empty when no progress is possible."""
        self.tally = Tally(self.judge)
        again = self._again(step)
        self.buffer.wanted = self.buffer.prompts_per_step - len(again)
        finished = self.fill(step, land=land)
        with self.clock.phase("generate"):
            groups, stale, surplus = self.buffer.take(step)
            self._book_stale(step, stale)
            for group in surplus:
                self._book(step, group, Fate.SURPLUS, "the batch was already full")
        if self.stop is not None and not groups:
            self.totals = self.totals.with_step(self.tally)
        return Batch(groups, finished, again)

    def fill(self, step: int, *, ahead: bool = False, land: bool = False) -> list[Group]:
        """Run groups until a batch is full, at once if it is, and with `land` until nothing is in flight; return those
        that finished. The loop calls it `ahead`, too, for the next batch while the update of `step` runs."""
        finished: list[Group] = []
        trained_at = step + ahead
        self.pace.begin_fill(ahead=ahead)
        with self.clock.phase_of_parts("generate", self.sampler.spent):
            self._stop_conditions.forget_rejected()
            self._exhausted = False
            self._book_stale(step, self.buffer.expire(trained_at))
            while True:
                if self.stop is None:
                    self._launch(step, trained_at)
                if self._ready(trained_at) and not self.pace.goes_on():
                    break
                self.pace.count_poll()
                finished += self._poll(step)
            while land and self.sampler.pending:
                finished += self._poll(step)
        return finished

    def _again(self, step: int) -> list[Group]:
        """Return the groups that take the place of new ones; book the rollouts of their audit."""
        if self.reuse is None:
            return []
        with self.clock.phase("reuse"):
            again = self.reuse.for_step(step)
        if audited := self.reuse.audited:
            tokens, seconds = sum(int(r.action_mask.sum()) for r in audited), sum(r.seconds for r in audited)
            self.ledger.evaluation(step, len(audited), tokens, seconds)
        return again

    def trained(self, step: int, batch: Batch, update: Mapping[str, float]) -> None:
        """Book a batch after its optimizer step; filter and gates learn. `update`: metrics, including `updated`."""
        fate, reason = Fate.TRAINED, ""
        if not update["updated"]:
            fate, reason = Fate.FILTERED, "no row of the batch had a gradient; the optimizer step was skipped"
        for group in batch.groups:
            filter_without_row(group, mask_truncated=self.limits.mask_truncated)
            self._book(step, group, fate, reason)
        failpoint("trained")
        if self.reuse is not None and update["updated"]:
            self.reuse.trained(batch.groups)
        self.totals = self.totals.plus(num_teacher_tokens=int(update.get("teacher/tokens", 0)))
        useless = self._stop_conditions.of_step(step, batch.trained_on, update, self.tally, self.buffer.wanted)
        self._untrained = self._stop_conditions.untrained(batch.trained_on, update, self.tally)
        self.stop = self.stop or useless
        self._method_metrics = self.filter.metrics()
        self.filter.end_step()
        for gate in self.gates.values():
            self._method_metrics |= gate.metrics()
            gate.end_step()
        self._method_metrics |= self.audits.metrics()
        self.audits.end_step()

    def end_step(self, step: int, groups: list[Group], update: Mapping[str, float]) -> dict[str, float]:
        """Close the account of the step from version `step`; return its metrics. `update`: metrics from elsewhere."""
        metrics = self.tally.metrics()
        self.totals = self.totals.with_step(self.tally)
        metrics |= {**self.totals.metrics(), "groups/effective": float(len(groups))}
        metrics |= {**update, **self._method_metrics, **self.selector.metrics(), "step": step + 1}
        metrics |= {} if self.reuse is None else self.reuse.metrics
        if "learning_rate" in update:  # what plain SGD over all prompts_per_step groups would need (Active-RLOO, eq. 4)
            metrics["eta_eff"] = update["effective_learning_rate"] * self.buffer.prompts_per_step / len(groups)
        self.group_size.observe_step(self.tally.without_forced(metrics))
        self.selector.end_step()
        metrics |= self.clock.metrics(seconds := self.clock.take())
        self.ledger.step(step, seconds=seconds, metrics=metrics, version=step)
        return metrics

    def warnings(self, finished: Sequence[Group]) -> Iterator[str]:
        """Yield causes of failed rollouts, and of a step that trained nothing; each once in a run."""
        yield from self.failures.observe(finished, "rollouts")
        if self._untrained is not None and cause_of(self._untrained) not in self._reported:
            self._reported.add(cause_of(self._untrained))
            yield f"the step trained nothing: {self._untrained}"

    def close(self, step: int, in_flight: Sequence[Group]) -> None:
        """Book groups that will never be trained, after the last save: carried ones and those still `in_flight`."""
        for group in self.buffer.groups:
            self._book(step, group, Fate.SURPLUS, "carried, but the run is over")
        for group in in_flight:
            self._book(step, self._with_probe(group), Fate.SURPLUS, "in flight when the run was over")
        self.buffer.clear()

    # ---- collecting ----------------------------------------------------------------------------------------------

    def _poll(self, step: int) -> list[Group]:
        finished = []
        for group in map(self._with_probe, self.sampler.poll()):
            self.judge.success.observe(group.rollouts)
            if not self._continue(group):
                finished.append(group)
                self._take(step, group)
        return finished

    def _ready(self, step: int) -> bool:
        """Return whether to train now; a stopping run takes the groups in flight first."""
        return self.pace.ready(step) if self.stop is None else not self.sampler.pending

    def _launch(self, step: int, trained_at: int) -> None:
        in_flight = self.sampler.pending
        n = self.pace.room(trained_at, self.limits.max_steps - trained_at, self.tally.zero_share())
        if n <= 0 or (self._exhausted and in_flight):
            return
        self.stop = self._stop_conditions.of_refill(step)
        if self.stop is not None:
            return
        visits = self.selector.select(n, self.audits.skips)
        self.ledger.visit(visits, step=step, version=self.sampler.version)
        failpoint("launch")
        kept = [visit for visit in visits if visit.verdict.keep]
        for visit in kept:
            self._start(visit, checked_size(self.group_size, visit.prompt))
        self._exhausted = len(kept) < n
        if not kept and not in_flight:
            self.stop = nothing_left(step, visits)

    def _start(self, visit: Visit, size: int) -> None:
        version, first = self.sampler.version, 0
        if (probe := self._probes.get(visit.number)) is not None:
            first, oldest = len(probe.rollouts), oldest_version(probe)
            version = version if oldest is None else min(version, oldest)
        self.buffer.launched(visit, size, version)
        self.sampler.launch(self.drafts.job(visit, size, first))

    def _with_probe(self, group: Group) -> Group:
        probe = self._probes.pop(group.visit.number, None)
        if probe is None:
            return group
        rollouts = [*probe.rollouts, *group.rollouts]
        zero_unrewarded_truncated(rollouts)
        return replace(group, rollouts=rollouts)

    def _continue(self, group: Group) -> bool:
        """Start the siblings that are to join a finished group; return whether there are any."""
        if self.stop is not None or len(group.rollouts) >= self.group_size.largest:
            return False
        if more := checked_additional_size(self.group_size, group, self.judge.kind(group)):
            self._probes[group.visit.number] = group
            self.buffer.continued(group.visit, more)
            self.drafts.observe(group)
            self.sampler.launch(self.drafts.job(group.visit, more, len(group.rollouts)))
        return more > 0

    def _take(self, step: int, group: Group) -> None:
        """Observe before admitting: selector and gates learn from every finished group, also from filtered ones."""
        self.buffer.landed(group)
        kind = self.judge.kind(group)
        for gate in self.gates.values():
            gate.observe_group(group)
        self.tally.finished(group)
        self.selector.observe_group(group)
        self.audits.observe_group(group, self.judge)
        self.group_size.observe_group(group)
        self.drafts.observe(group)
        failpoint("take")
        self.stop = self.stop or self._stop_conditions.of_failures(step, self.tally, self.buffer.wanted)
        reason = refusal = self.judge.refusal(group)
        if reason is None:
            verdict = checked_verdict(self.filter, group, kind)
            if verdict.keep:
                self.buffer.add(group)
                self._stop_conditions.forget_rejected()
                return
            reason = verdict.reason
        elif group.verdict.keep:
            self.tally.refused[reason] += 1
        self._book(step, group, Fate.FILTERED, reason)
        if self.filter.refill:
            self._stop_conditions.rejected(group, reason, refusal)
        else:
            self.buffer.unreplaced += 1

    def _book_stale(self, step: int, groups: list[Group]) -> None:
        for group in groups:
            self._book(step, group, Fate.STALE, f"older than max_lag={self.buffer.max_lag} steps")

    def _book(self, step: int, group: Group, fate: Fate, reason: str) -> None:
        """Give every rollout without a fate this one, and book the group."""
        for rollout in group.rollouts:
            if rollout.fate is None:
                rollout.fate, rollout.reason = fate, reason
        self.ledger.finish(group, step=step)
        self.tally.fated(group)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state other than the ledger."""
        if not self.pace.can_checkpoint():
            raise RuntimeError("a checkpoint is taken between steps only, with no group in flight")
        return {
            **self.totals.model_dump(),
            **self._stop_conditions.state_dict(),
            "undecided": self.judge.success.undecided,
            "waiting": [group_state(group) for group in self.buffer.groups],
            "unreplaced": self.buffer.unreplaced,
            "polled": self.pace.polled,
            "probes": [group_state(probe) for probe in self._probes.values()],
            "in_flight": [[visit_state(flight.visit), flight.size] for flight in self.buffer.in_flight],
            "selector": state_with_audit(self.selector, self.audits.skips),
            "group_size": self.group_size.state_dict(),
            "filter": self.filter.state_dict(),
            "gates": {name: state_with_audit(gate, self.audits.stops.get(name)) for name, gate in self.gates.items()},
            "reuse": None if self.reuse is None else self.reuse.state_dict(),
            "drafts": self.drafts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | CollectorState) -> None:
        """Restore a state. Raises ValueError on one that this configuration cannot have."""
        saved = CollectorState.of(state)
        self.totals = TokenTotals.of(saved.model_dump(include=set(TokenTotals.model_fields)))
        self._stop_conditions.load_state_dict(saved.model_dump(include=set(StopCounts.model_fields)))
        if not self.judge.success.declared:
            self.judge.success.undecided = self.judge.success.undecided or saved.undecided
        with at("waiting"):
            for group in saved_groups(saved.waiting, self.prompts):
                self.buffer.add(group)
        with at("probes"):
            self._probes = {probe.visit.number: probe for probe in saved_groups(saved.probes, self.prompts)}
        if self.reuse is not None and saved.reuse is not None:
            with at("reuse"):
                groups = saved_groups([used.group for used in saved.reuse], self.prompts)
                self.reuse.load(groups, [used.uses for used in saved.reuse])
        self.drafts.load(saved.drafts)
        self.buffer.unreplaced, self.pace.polled = saved.unreplaced, saved.polled
        with at("selector"):
            load_with_audit(self.selector, self.audits.skips, saved.selector)
        with at("group_size"):
            self.group_size.load_state_dict(saved.group_size)
        with at("filter"):
            self.filter.load_state_dict(saved.filter)
        for name, gate in self.gates.items():
            with at(f"gates.{name}"):
                load_with_audit(gate, self.audits.stops.get(name), saved.gates[name])

    def kept_groups(self) -> list[Group]:
        """Return the finished groups that may still be trained."""
        used = [] if self.reuse is None else [used.group for used in self.reuse.groups]
        return [*self.buffer.groups, *self._probes.values(), *used]

    def relaunch(self, in_flight: Sequence[tuple[list[Any], int]]) -> None:
        """Relaunch the groups that were in flight; they stay booked as dispatched."""
        visits = [visit_from(visit, self.prompts["train"]) for visit, _ in in_flight]
        _VISITS.validate_python(visits)
        if unknown := self._probes.keys() - {visit.number for visit in visits}:
            raise ValueError(f"visits {sorted(unknown)} have a probe, but are not in flight")
        for visit, (_, size) in zip(visits, in_flight, strict=True):
            probe = self._probes.get(visit.number)
            whole = size if probe is None else size + len(probe.rollouts)
            if whole > self.group_size.largest:
                raise ValueError(f"groups have at most {self.group_size.largest} rollouts (got {whole})")
            self._start(visit, size)
