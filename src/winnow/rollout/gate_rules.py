"""Rules of gates as the rollout runner asks them: when, about whom, with what view."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from ..config import ConfigError
from ..engine.base import Engine, Reached
from ..env.base import Task
from ..methods.gate import NamedRule, env_steps
from ..types import Decision, EnvStep, GroupView, Token
from .in_flight import Flight, Sibling


class ActiveRules:
    """Rules of one optimizer step.

    Raises ConfigError when the engine lacks what a rule needs, or nobody would be running where it is asked.
    """

    def __init__(self, rules: Sequence[NamedRule], engine: Engine, task: Task) -> None:
        for named in rules:
            if missing := _needs(named) - engine.provides:
                raise ConfigError(
                    f"gate {named.name} needs {sorted(missing)}, but engine {type(engine).__name__} "
                    f"does not provide it (only {sorted(engine.provides)})"
                )
            last = max(env_steps(named.rule), default=0)
            if last >= task.max_turns:
                raise ConfigError(
                    f"a gate is to be asked after {last} environment steps, but nobody is running by then: task "
                    f"{task.name} has at most {task.max_turns} turns (gate {named.name})"
                )
        self._rules = {named.name: named for named in rules}
        self.needs: frozenset[str] = frozenset().union(*map(_needs, rules))
        """Capabilities of the engine that the rules need."""

    def assign(self, flight: Flight) -> None:
        """Note where a group is to be asked about; rules that come later do not change it."""
        steps = [(k, name) for name, named in self._rules.items() for k in env_steps(named.rule)]
        flight.undecided = sorted(steps, key=itemgetter(0))
        for name, named in self._rules.items():
            if isinstance(at := named.rule.at, Token):
                flight.token_gates.setdefault(at.n, []).append(name)

    def about_group(self, flight: Flight, k: int) -> Decision | None:
        """Ask those whose turn it is at step `k`, until one cuts: its decision, or None."""
        while flight.undecided and flight.undecided[0][0] == k:
            named = self._rules[flight.undecided.pop(0)[1]]
            (decision,) = named.decide([flight.view(EnvStep(k))])
            flight.decisions.append(decision)
            for sibling in flight.gated:
                sibling.decided(decision)
            if not decision.verdict.keep:
                return decision
        return None

    def about_rollouts(self, reached: Sequence[tuple[Flight, Sibling, Reached]]) -> list[tuple[Flight, Sibling, str]]:
        """Ask about all who came to a token at once; whom to prune, with the reason. A gate asks once a rollout."""
        open_ = self._views(reached)
        pruned: list[tuple[Flight, Sibling, str]] = []
        for name, named in self._rules.items():
            asked = [each for each in open_ if name in each[3]]
            decisions = named.decide([view for _, _, view, _ in asked]) if asked else []
            for (flight, sibling, _, gates), decision in zip(asked, decisions, strict=True):
                sibling.decided(decision)
                sibling.decisions.append(decision)
                if not decision.verdict.keep:
                    gates.clear()
                    pruned.append((flight, sibling, decision.verdict.reason))
        return pruned

    @staticmethod
    def _views(
        reached: Sequence[tuple[Flight, Sibling, Reached]],
    ) -> list[tuple[Flight, Sibling, GroupView, list[str]]]:
        """Views of those who came to a token, each with the gates that have not asked about it yet."""
        found: list[tuple[Flight, Sibling, GroupView, list[str]]] = []
        groups: dict[tuple[str, int, int], GroupView] = {}
        for flight, sibling, event in reached:
            at = (*flight.key, event.n)
            if at not in groups:
                groups[at] = flight.view(Token(event.n))
            group = groups[at]
            view = GroupView(  # `replace` takes three times as long
                visit=group.visit,
                at=group.at,
                actions=group.actions,
                observations=group.observations,
                running=group.running,
                sibling=sibling.index,
                hidden=event.hidden,
                logp=event.logp,
                logp_before=sibling.sampled_logp(),
                confidence=event.confidence,
                raw_logp=event.raw_logp,
                absent=group.absent,
                progress=group.progress,
                decisions=tuple(sibling.decisions),
                turn=len(sibling.turns),
            )
            before = {decision.gate for decision in sibling.decisions}
            found.append((flight, sibling, view, [g for g in flight.token_gates[event.n] if g not in before]))
        return found


def _needs(named: NamedRule) -> frozenset[str]:
    """Capabilities that a rule needs of the engine; at tokens also reports and an exact end there."""
    at_token = isinstance(named.rule.at, Token)
    return named.rule.needs | (frozenset({"report_at", "exact_cancel"}) if at_token else frozenset())
