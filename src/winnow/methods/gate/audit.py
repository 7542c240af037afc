"""Audits of rules: some removals are overridden at random and run on, to measure the rule's mistakes.

A *removal* is a skip of a selector or a stop of a gate. It is overridden with a known probability, and the finished
group shows the signal that would have been lost. `estimates.py` extends these few results to all removals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from ...base.state import State, Stateful, at
from ...types import Decision, Fate, Group, GroupKind, Token, Verdict
from ..agents import by_agent
from ..group_kind import GroupJudge
from .base import Gate, NamedRule, of_gate
from .estimates import Sum, Sums
from .overrides import OVERRIDE, Overrides, keep_probability, survival

WINDOW = 25
"""Steps after which a removal counts e times less for the controller."""


class AuditState(State):
    probability: Annotated[float, Field(gt=0, le=1)]
    largest: Sum
    whole: Sums
    recent: Sums


class RuleAudit(Stateful):
    """Draws the overrides of one rule, keeps its account, and estimates its mistakes. Pure bookkeeping.

    `epsilon`: probability of an override. With `max_signal_loss` it is the lowest probability. A controller then
    steers the actual one, so that carried-out removals hold at most that share of all signal. The probability starts at
    1: nothing is removed without evidence. After each step

        probability = clip(1 - max_signal_loss / U, epsilon, 1),

    with U the upper bound of the share of the signal held by all removals of about the last `WINDOW` steps, carried out
    or not. So (1 - probability) U, a bound of the share lost, never exceeds `max_signal_loss`. This holds for any rule,
    random or not, that changes slowly compared with `WINDOW`. An abrupt change is noticed within a fraction of it. The
    bound is on the expected loss; the luck of the draws evens out.
    """

    state_model = AuditState

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

    def of_skip(self, verdict: Verdict, drawn: bool) -> Verdict:
        """Return a selector's verdict on a visit under this audit, and record a skip; `drawn`: it must not be skipped.

        The probability is that of `survival`.
        """
        p = survival(keep_probability(verdict), self.probability)
        if verdict.keep:
            return Verdict(True, verdict.reason, p)
        if not drawn:
            self.removed(self.probability)
            return Verdict(False, verdict.reason, 1 - p)
        return Verdict(True, f"audit: {verdict.reason}", p, overridden=self.probability)

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

    def end_step(self) -> None:
        """End an optimizer step: steer the probability and decay the recent sums."""
        if self.max_signal_loss is not None and self.recent.removed + self.recent.audited > 0:
            bound = self.recent.signal_removed(self.largest).high
            self.probability = min(1.0, max(self.epsilon, 1 - self.max_signal_loss / max(bound, 1e-12)))
        self.recent.decay(math.exp(-1 / WINDOW))

    def metrics(self) -> dict[str, float]:
        """Return metrics over the whole run, under `audit/<name>/`, without values that are still unknown."""
        found = {
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
            found |= {key: value, f"{key}_low": low, f"{key}_high": high}
        return {f"audit/{self.name}/{key}": float(value) for key, value in found.items() if math.isfinite(value)}


def squared_advantages(group: Group, judge: GroupJudge) -> np.ndarray | None:
    """Return float64 [G], 0 for absent members; None if failures left too few rewards: that is no evidence.

    A group that another rule stopped has no signal: if this rule had stopped it first, nothing more would be lost. An
    advantage over the whole batch gets the group alone. Of several agents, the sum.
    """
    if any(r.agent_rewards for r in group.rollouts):
        known = [squared_advantages(of_one, judge) for of_one in by_agent([group])]
        found = [squares_G for squares_G in known if squares_G is not None]
        return np.sum(found, axis=0) if found else None
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


class Audited:
    """Keeps the account of a rule's removals, carried out or overridden, for the gate or selector whose they are.

    `judge` is the run's, with its advantage. What is not defined here is the part's own.
    """

    kind: ClassVar[str]
    """Key of the part in the state."""

    def __init__(self, part: Any, audit: RuleAudit, judge: GroupJudge) -> None:
        self.part = part
        self.audit = audit
        self.judge = judge

    def __getattr__(self, name: str) -> Any:
        if name == "part":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.part, name)

    def observe(self, group: Group) -> None:
        """Let the part learn first, also from overridden removals; then keep the account."""
        self.part.observe(group)
        self._account(group, squared_advantages(group, self.judge))

    def _account(self, group: Group, signal_G: np.ndarray | None) -> None:
        raise NotImplementedError

    def _book(self, probability: float | None, signal: float, tokens: float) -> None:
        """Record what a removal would have taken; `probability`: of its override, None if the rule let it pass."""
        if probability is None:
            self.audit.kept(signal)
        else:
            self.audit.audited(probability, signal, tokens)

    def end_step(self) -> None:
        self.part.end_step()
        self.audit.end_step()

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.part.metrics()
        return found | self.audit.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return part and account; what is in flight carries its own decisions."""
        return {self.kind: self.part.state_dict(), "audit": self.audit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with at(self.kind):
            self.part.load_state_dict(state[self.kind])
        with at("audit"):
            self.audit.load_state_dict(state["audit"])


class AuditedGate(Audited):
    """A gate, with the account of its stops."""

    kind = "gate"

    def overrides(self) -> Overrides:
        """Return the draws of overrides, published with the rule."""
        return self.audit.overrides()

    def _account(self, group: Group, signal_G: np.ndarray | None) -> None:
        name = self.audit.name
        decisions = list(group.decisions)
        for rollout in group.rollouts:
            decisions += rollout.decisions
        taken = of_gate(decisions, name)
        for decision in taken:
            if not decision.verdict.keep:
                self.audit.removed(decision.verdict.evidence[OVERRIDE])
        if signal_G is None:
            return
        if not taken or not isinstance(taken[0].at, Token):
            override = _override(taken)
            later = [turn for rollout in group.rollouts for turn in rollout.turns[override[1] if override else 0 :]]
            tokens = float(sum(turn.stop - turn.start for turn in later))
            self._book(override and override[0], float(signal_G.sum()), tokens)
            return
        for rollout, signal in zip(group.rollouts, signal_G.tolist(), strict=True):
            if rollout.fate != Fate.FAILED:
                override = _override(of_gate(rollout.decisions, name))
                start = rollout.turns[override[1]].start + taken[0].at.n if override else 0
                self._book(override and override[0], signal, float(rollout.action_mask[start:].sum()))


def _override(decisions: Sequence[Decision]) -> tuple[float, int] | None:
    """Return the probability of the first override among decisions, and the turns finished by then."""
    found = [(d.verdict.overridden, d.turn) for d in decisions if d.verdict.overridden is not None]
    return found[0] if found else None


class AuditedSelector(Audited):
    """A selector, with the account of its skips, some of which it overrides as `audit` draws, by (epoch, prompt).

    An overridden skip is one of the `n` visits of `select`. Its group is like any other: the selector learns from it,
    and the run trains on it.
    """

    kind = "selector"

    def __init__(self, selector: Any, audit: RuleAudit, judge: GroupJudge) -> None:
        super().__init__(selector, audit, judge)
        selector.audit = audit

    def _account(self, group: Group, signal_G: np.ndarray | None) -> None:
        if signal_G is not None:
            tokens = float(sum(r.action_mask.sum() for r in group.rollouts))
            self._book(group.visit.verdict.overridden, float(signal_G.sum()), tokens)


def rules_of(gates: Mapping[str, Gate]) -> list[NamedRule]:
    """Return the rules that a run's gates publish, under their names."""
    return [NamedRule(name, gate.rule(), gate.overrides()) for name, gate in gates.items()]
