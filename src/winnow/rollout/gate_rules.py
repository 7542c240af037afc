"""Apply gate rules to groups in flight: which rules decide at a gate point, and on what view."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ..base.errors import ConfigError
from ..engine.base import Engine, Reached
from ..env.base import Task
from ..env.prompting import decode
from ..methods.gate import NamedRule, env_steps
from ..types import Decision, EnvStep, GroupView, Token
from .answers import STUCK_S
from .in_flight import Flight, Sibling


class ActiveRules:
    """Rules of one optimizer step.

    Raises ConfigError when the engine does not provide what a rule needs, or no rollout reaches its gate point.
    """

    def __init__(self, rules: Sequence[NamedRule], engine: Engine, task: Task, tokenizer: Any) -> None:
        for named in rules:
            if missing := _needs(named) - engine.provides:
                raise ConfigError(
                    f"gates: {named.name} needs {sorted(missing)}, which engine {type(engine).__name__} does not "
                    f"provide (it provides {sorted(engine.provides)}); use another engine or gate"
                )
            last = max(env_steps(named.rule), default=0)
            if last >= task.max_turns:
                raise ConfigError(
                    f"gates: {named.name} decides after {last} environment steps, but task {task.name} has at most "
                    f"{task.max_turns} turns, so no rollout runs then; use an earlier step, or a task with more turns"
                )
        self._rules = {named.name: named for named in rules}
        self.needs: frozenset[str] = frozenset().union(*map(_needs, rules))
        """Capabilities of the engine that the rules need."""
        self._tokenizer = tokenizer

    def assign(self, flight: Flight) -> None:
        """Fix the gate points of a group; later rules do not change them."""
        steps = [(k, name) for name, named in self._rules.items() for k in env_steps(named.rule)]
        flight.undecided = sorted(steps, key=itemgetter(0))
        for name, named in self._rules.items():
            if isinstance(at := named.rule.at, Token):
                flight.token_gates.setdefault(at.n, []).append(name)

    def about_group(self, flight: Flight, k: int) -> Decision | None:
        """Apply the rules of environment step `k` until one cuts; return that decision, or None."""
        while flight.undecided and flight.undecided[0][0] == k:
            named = self._rules[flight.undecided.pop(0)[1]]
            view = GroupView(**flight.shared_view(EnvStep(k)), decisions=tuple(flight.decisions), turn=k)
            (decision,) = named.decide([view])
            flight.decisions.append(decision)
            for sibling in flight.gated:  # those that have ended, too
                sibling.rollout.survival_p *= decision.verdict.probability
            if not decision.verdict.keep:
                return decision
        return None

    @staticmethod
    def give_up(flight: Flight) -> list[Sibling]:
        """Drop the decisions that siblings wait for, and return those siblings.

        The others may wait for something that one of these holds, such as a semaphore or a pool.
        """
        waiting = [sibling for sibling in flight.gated if sibling.waiting_since is not None]
        if waiting:
            k, gate = flight.undecided[0]
            warnings.warn(
                f"gate {gate}: for {STUCK_S:g} s no sibling came to environment step {k}, so those that waited there "
                "go on without its decision; do the others wait for something that these hold (a semaphore, a pool)?",
                stacklevel=2,
            )
            flight.undecided = [point for point in flight.undecided if point[0] != k]
        return waiting

    def about_rollouts(self, reached: Sequence[tuple[Flight, Sibling, Reached]]) -> list[tuple[Flight, Sibling, str]]:
        """Decide about all rollouts at a token; return those to prune, with reasons. A gate decides once a rollout."""
        open_ = self._views(reached)
        pruned: list[tuple[Flight, Sibling, str]] = []
        for name, named in self._rules.items():
            undecided = [each for each in open_ if name in each[3]]
            decisions = named.decide([view for _, _, view, _ in undecided]) if undecided else []
            for (flight, sibling, _, gates), decision in zip(undecided, decisions, strict=True):
                sibling.rollout.survival_p *= decision.verdict.probability
                sibling.rollout.decisions.append(decision)
                if not decision.verdict.keep:
                    gates.clear()
                    pruned.append((flight, sibling, decision.verdict.reason))
        return pruned

    def _views(
        self, reached: Sequence[tuple[Flight, Sibling, Reached]]
    ) -> list[tuple[Flight, Sibling, GroupView, list[str]]]:
        """Return views of rollouts at a token, each with the gates that have not yet decided about it."""
        views: list[tuple[Flight, Sibling, GroupView, list[str]]] = []
        groups: dict[tuple[str, int, int], dict[str, Any]] = {}
        tokens = [event.token_ids for *_, event in reached] if "text" in self.needs else []
        texts = decode(self._tokenizer, [ids for ids in tokens if ids is not None]) or [""] * len(reached)
        for (flight, sibling, event), text in zip(reached, texts, strict=True):
            at = (*flight.key, event.n)
            if at not in groups:
                groups[at] = flight.shared_view(Token(event.n))
            view = GroupView(
                **groups[at],
                sibling=sibling.rollout.sibling,
                hidden=event.hidden,
                logp=event.logp,
                logp_before=sibling.sampled_logp(),
                raw_logp=event.raw_logp,
                text=text,
                decisions=tuple(sibling.rollout.decisions),
                turn=len(sibling.rollout.turns),
            )
            before = {decision.gate for decision in sibling.rollout.decisions}
            views.append((flight, sibling, view, [g for g in flight.token_gates[event.n] if g not in before]))
        return views


def _needs(named: NamedRule) -> frozenset[str]:
    """Return the engine capabilities that a rule needs; at tokens also reports and exact cancels."""
    at_token = isinstance(named.rule.at, Token)
    return named.rule.needs | (frozenset({"report_at", "exact_cancel"}) if at_token else frozenset())
