"""Audits of rules: some removals are overridden at random and run on, to measure the rule's mistakes.

A *removal* is a skip of a selector or a stop of a gate. It is overridden with a known probability, and the finished
group shows the signal that would have been lost. `estimates.py` extends these few results to all removals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from ...base.state import State, Stateful, at
from ...types import KEEP, Fate, Group, GroupKind, Token, Verdict
from ..agents import by_agent
from ..group_kind import GroupJudge
from .base import OVERRIDE, Gate, NamedRule, Overrides, first_override, keep_probability, of_gate, survival
from .estimates import Sum, Sums

MEMORY_STEPS = 25
"""Steps after which a removal counts e times less for the controller."""


class AuditState(State):
    probability: Annotated[float, Field(gt=0, le=1)]
    largest: Sum
    whole: Sums
    recent: Sums


class RuleAudit(Stateful):
    """Draws the overrides of one rule, keeps its account, and estimates its mistakes. Pure bookkeeping.

    `StopAudit` accounts for the groups that a gate stops, `SkipAudit` for the visits that a selector skips.

    `epsilon`: probability of an override. With `max_signal_loss` it is the lowest probability. A controller then
    steers the actual one, so that carried-out removals hold at most that share of all signal. The probability starts at
    1: nothing is removed without evidence. After each step

        probability = clip(1 - max_signal_loss / U, epsilon, 1),

    with U the upper bound of the share of the signal held by all removals of about the last `MEMORY_STEPS` steps,
    carried out or not. So (1 - probability) U, a bound of the share lost, never exceeds `max_signal_loss`. This holds
    for any rule, random or not, that changes slowly compared with `MEMORY_STEPS`. An abrupt change is noticed within a
    fraction of it. The bound is on the expected loss; the luck of the draws evens out.
    """

    state_model = AuditState
    audited_part: ClassVar[str]
    """Kind of method that has the rule; its key in the state."""

    def __init__(self, name: str, epsilon: float, max_signal_loss: float | None = None, *, seed: int = 0) -> None:
        self.name = name
        self.epsilon = epsilon
        self.max_signal_loss = max_signal_loss
        self.probability = epsilon if max_signal_loss is None else 1.0
        """Current probability of an override."""
        self.largest = 0.0
        """Largest signal seen, kept ones included."""
        self.whole, self.recent = Sums(), Sums()
        self.seed = seed

    def overrides(self) -> Overrides:
        """Return the draws of overrides at the current probability."""
        return Overrides(self.name, self.seed, self.probability)

    def observe_group(self, group: Group, signal_G: np.ndarray | None) -> None:
        """Account for a finished group, after the part has learned from it; `signal_G`: its `squared_advantages`."""
        raise NotImplementedError

    def removed(self, probability: float) -> None:
        """Record a carried-out removal that could have been overridden with `probability`."""
        for sums in (self.whole, self.recent):
            sums.remove(probability, 1)

    def audited(self, probability: float, signal: float, tokens: float) -> None:
        """Record the end of a removal that was overridden with `probability`.

        `signal`: squared norm of its advantages, 0 if it was worthless. `tokens`: sampled tokens that the removal would
        have saved.
        """
        self.largest = max(self.largest, float(signal))
        for sums in (self.whole, self.recent):
            sums.audit(probability, float(signal), float(tokens))

    def kept(self, signal: float) -> None:
        """Record the end of something that the rule let pass."""
        self.largest = max(self.largest, float(signal))
        for sums in (self.whole, self.recent):
            sums.kept_signal += float(signal)

    def _book(self, verdict: Verdict, signal: float, tokens: float) -> None:
        """Record the end of what the rule let pass, or would have removed without an override."""
        probability = verdict.override_probability
        if probability is None:
            self.kept(signal)
        else:
            self.audited(probability, signal, tokens)

    def end_step(self) -> None:
        """End an optimizer step: steer the probability and decay the recent sums."""
        if self.max_signal_loss is not None and self.recent.removed + self.recent.audited > 0:
            bound = self.recent.signal_removed(self.largest).high
            self.probability = min(1.0, max(self.epsilon, 1 - self.max_signal_loss / max(bound, 1e-12)))
        self.recent.decay(math.exp(-1 / MEMORY_STEPS))

    def metrics(self) -> dict[str, float]:
        """Return metrics over the whole run, under `audit/<name>/`, without values that are still unknown."""
        metrics = {
            "audited": self.whole.audited,
            "removed": self.whole.removed,
            "override_probability": self.probability,
            "carried_out": 1 - self.probability,
        }
        estimates = {
            "precision": self.whole.precision(),
            "signal_lost": self.whole.signal_lost(self.largest),
            "tokens_saved": self.whole.tokens_saved(),
        }
        for key, (value, low, high) in estimates.items():
            metrics |= {key: value, f"{key}_low": low, f"{key}_high": high}
        return {f"audit/{self.name}/{key}": float(value) for key, value in metrics.items() if math.isfinite(value)}


def squared_advantages(group: Group, judge: GroupJudge) -> np.ndarray | None:
    """Return float64 [G], 0 for absent members; None if failures left too few rewards: that is no evidence.

    A group that another rule stopped has no signal: if this rule had stopped it first, nothing more would be lost. An
    advantage over the whole batch gets the group alone. Of several agents, the sum.
    """
    if any(r.agent_rewards for r in group.rollouts):
        of_agents = [squared_advantages(of_one, judge) for of_one in by_agent([group])]
        known = [squares_G for squares_G in of_agents if squares_G is not None]
        return np.sum(known, axis=0) if known else None
    advantage, rewards_G = judge.advantage, group.rewards()
    assert advantage is not None
    kind = judge.of_rewards(group.known_rewards())
    if kind is GroupKind.NOT_JUDGED and any(r.fate == Fate.FAILED for r in group.rollouts):
        return None
    if kind is GroupKind.NOT_JUDGED or (advantage.group_relative and kind.zero_variance):
        return np.zeros(len(rewards_G))
    if advantage.greedy_baseline and group.greedy_reward() is None:
        return None
    squares: np.ndarray = np.nan_to_num(advantage.of_batch([group])[0]) ** 2
    return squares


class StopAudit(RuleAudit):
    """Audits the stops of a gate; its overrides are published with the gate's rule."""

    audited_part = "gate"

    def observe_group(self, group: Group, signal_G: np.ndarray | None) -> None:
        decisions = list(group.decisions)
        for rollout in group.rollouts:
            decisions += rollout.decisions
        taken = of_gate(decisions, self.name)
        for decision in taken:
            if not decision.verdict.keep:
                self.removed(decision.verdict.evidence[OVERRIDE])
        if signal_G is None:
            return
        if not taken or not isinstance(taken[0].at, Token):
            override = first_override(taken)
            start = override.turn if override else 0
            later = [turn for rollout in group.rollouts for turn in rollout.turns[start:]]
            tokens = float(sum(turn.stop - turn.start for turn in later))
            self._book(override.verdict if override else KEEP, float(signal_G.sum()), tokens)
            return
        for rollout, signal in zip(group.rollouts, signal_G.tolist(), strict=True):
            if rollout.fate != Fate.FAILED:
                override = first_override(of_gate(rollout.decisions, self.name))
                start = rollout.turns[override.turn].start + taken[0].at.n if override else 0
                tokens = float(rollout.action_mask[start:].sum())
                self._book(override.verdict if override else KEEP, signal, tokens)


class SkipAudit(RuleAudit):
    """Audits the skips of a selector; `StreamSelector.select` draws the overrides, by (epoch, prompt).

    An overridden skip is one of the `n` visits of `select`. Its group is like any other: the selector learns from it,
    and the run trains on it.
    """

    audited_part = "selector"

    def decide(self, verdict: Verdict, drawn: bool) -> Verdict:
        """Return a selector's verdict on a visit under this audit, and record a skip; `drawn`: it must not be skipped.

        The probability is that of `survival`.
        """
        p = survival(keep_probability(verdict), self.probability)
        if verdict.keep:
            return Verdict(True, verdict.reason, p)
        if not drawn:
            self.removed(self.probability)
            return Verdict(False, verdict.reason, 1 - p)
        return Verdict(True, f"audit: {verdict.reason}", p, override_probability=self.probability)

    def observe_group(self, group: Group, signal_G: np.ndarray | None) -> None:
        if signal_G is not None:
            tokens = float(sum(r.action_mask.sum() for r in group.rollouts))
            self._book(group.visit.verdict, float(signal_G.sum()), tokens)


@dataclass(frozen=True)
class Audits:
    """The audits of a run."""

    stops: Mapping[str, StopAudit] = field(default_factory=dict)
    """By gate."""
    skips: SkipAudit | None = None

    @property
    def every(self) -> list[RuleAudit]:
        return [*self.stops.values(), *([] if self.skips is None else [self.skips])]

    def observe_group(self, group: Group, judge: GroupJudge) -> None:
        """Account for a finished group, after selector and gates have learned from it; `judge` is the run's."""
        if audits := self.every:
            signal_G = squared_advantages(group, judge)
            for audit in audits:
                audit.observe_group(group, signal_G)

    def end_step(self) -> None:
        for audit in self.every:
            audit.end_step()

    def metrics(self) -> dict[str, float]:
        return {name: value for audit in self.every for name, value in audit.metrics().items()}


def state_with_audit(part: Stateful, audit: RuleAudit | None) -> dict[str, Any]:
    """Return the state of a selector or gate and of its audit; what is in flight carries its own decisions."""
    if audit is None:
        return part.state_dict()
    return {audit.audited_part: part.state_dict(), "audit": audit.state_dict()}


def load_with_audit(part: Stateful, audit: RuleAudit | None, state: Mapping[str, Any]) -> None:
    """Load what `state_with_audit` returned."""
    if audit is None:
        part.load_state_dict(state)
        return
    with at(audit.audited_part):
        part.load_state_dict(state[audit.audited_part])
    with at("audit"):
        audit.load_state_dict(state["audit"])


def rules_of(gates: Mapping[str, Gate], audits: Audits) -> list[NamedRule]:
    """Return the rules that a run's gates publish, with their overrides, under their names."""
    rules = []
    for name, gate in gates.items():
        audit = audits.stops.get(name)
        rules.append(NamedRule(name, gate.rule(), None if audit is None else audit.overrides()))
    return rules
