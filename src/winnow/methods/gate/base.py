"""Gates: a rule next to the engine decides, and the gate learns in the training loop.

gate.rule() -> Rule            frozen within an optimizer step; published to samplers with the weights
rule.decide(views)             next to the engine: stop this rollout, or this group?
gate.observe_group(group)      in the training loop: learn from the decisions in a finished group
gate.end_step()                in the training loop: update; the next `rule()` may differ
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from ...base.array_json import pack, unpack
from ...base.noise import noise_key, uniform_array
from ...types import Decision, EnvStep, GatePoint, Group, GroupView, Token, Verdict
from ..base import LearningMethod
from ..group_kind import BY_REWARDS, GroupJudge

Array = Annotated[
    np.ndarray,
    PlainValidator(lambda value: value if isinstance(value, np.ndarray) else unpack(value)),
    PlainSerializer(pack),
]
"""An array among a rule's fields."""


@dataclass(frozen=True)
class GateContext:
    """Facts about the run for building a gate."""

    name: str
    """Name of the gate in this run; its decisions carry it."""
    seed: int = 0
    judge: GroupJudge = BY_REWARDS
    """Which groups have a signal, which answers are right, and how many rewards the advantage needs."""


class Rule(Protocol):
    """The deciding half of a gate: a frozen dataclass whose fields pydantic can write as JSON (arrays: `Array`).

    It keeps no state: its earlier decisions are in `GroupView.decisions`.
    """

    @property
    def at(self) -> GatePoint | tuple[EnvStep, ...]:
        """When it decides. `Token(n)`: on each rollout, once, after n sampled tokens of a turn. `EnvStep(k)`: on the
        whole group, when every rollout has taken k steps or ended; with several, at each until it cuts the group."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that the engine must provide, e.g. {"hidden"}."""
        ...

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        """Return one verdict per view, in order. A verdict must not depend on the other views."""
        ...


class Gate(LearningMethod):
    """Stops rollouts during generation. To add a gate, derive from it and write `rule`; override the rest to learn."""

    def rule(self) -> Rule:
        """Return the rule for the next optimizer step."""
        raise NotImplementedError

    def observe_group(self, group: Group) -> None:
        """Learn from a finished group; called for each. Decisions are in `decisions` of the group and its rollouts."""

    def save(self, directory: Path) -> None:
        """Write files that belong to the saved model, if any."""


class FixedGate(Gate):
    """A rule that never changes. Its metrics are the number of decisions on the step's groups, the share that cut and,
    with `signals`, the mean of each; a decision without any of them does not count. Empty without decisions."""

    def __init__(self, name: str, rule: Rule, signals: Collection[str] = ()) -> None:
        self.name, self._rule, self._signals = name, rule, signals
        self._verdicts: list[Verdict] = []

    def rule(self) -> Rule:
        return self._rule

    def observe_group(self, group: Group) -> None:
        verdicts = [decision.verdict for decision in of_gate(group.decisions, self.name)]
        self._verdicts += [v for v in verdicts if not self._signals or v.evidence.keys() & self._signals]

    def end_step(self) -> None:
        self._verdicts = []

    def metrics(self) -> dict[str, float]:
        if not self._verdicts:
            return {}
        cut_share = float(np.mean([verdict.removes for verdict in self._verdicts]))
        figures = {"asked": float(len(self._verdicts)), "cut_share": cut_share}
        for signal in self._signals:
            values = [verdict.evidence[signal] for verdict in self._verdicts if signal in verdict.evidence]
            if values:
                figures[signal] = float(np.mean(values))
        return {f"gate/{self.name}/{name}": value for name, value in figures.items()}


AUDIT_STREAM = 4
"""Separates the draws of audits from other noise."""


@dataclass(frozen=True)
class Overrides:
    """Random overrides of one rule's stops; travels with the rule to its sampler.

    A sibling (or, at environment steps, a group) has one draw for all its gate points, and counts as one removal.
    """

    name: str
    seed: int
    probability: float

    def draws(self, last_N: np.ndarray, *key: int) -> np.ndarray:
        """Return bool [N]: which of the removals (*key, last) are overridden.

        A function of seed, name, key and probability only: order and batching do not change it.
        """
        noise = noise_key(self.seed, AUDIT_STREAM, zlib.crc32(self.name.encode()), *key)
        return uniform_array(noise, last_N) < self.probability

    def apply(self, view: GroupView, verdict: Verdict, earlier: Sequence[Decision]) -> Verdict:
        """Return the rule's verdict, or its override; `earlier` are this rule's decisions about the same rollout.

        A rollout passes all decisions with `survival(p, epsilon)`, p its chance to pass the rule alone. The verdict's
        probability is the factor of this decision on that chance.
        """
        override = first_override(earlier)
        overridden = None if override is None else override.verdict.override_probability
        if not verdict.keep and overridden is None:
            key = [view.visit.prompt.ordinal, view.visit.epoch]
            *before, last = key if view.sibling is None else [*key, view.sibling]
            if bool(self.draws(np.array([last]), *before)[0]):
                overridden = self.probability
        epsilon = self.probability if overridden is None else overridden
        alone = math.prod((d.verdict.evidence[ALONE] for d in earlier), start=1.0)
        p = keep_probability(verdict)
        survives = survival(alone * p, epsilon) / survival(alone, epsilon)
        goes_on = verdict.keep or overridden is not None
        return replace(
            verdict,
            keep=goes_on,
            reason=verdict.reason if verdict.keep or not goes_on else f"audit: {verdict.reason}",
            probability=survives if goes_on else 1 - survives,
            override_probability=None if verdict.keep else overridden,
            evidence={**verdict.evidence, ALONE: p, OVERRIDE: epsilon},
        )


def first_override(decisions: Sequence[Decision]) -> Decision | None:
    """Return the first decision that an audit overrode."""
    return next((d for d in decisions if d.verdict.override_probability is not None), None)


ALONE, OVERRIDE = "kept_alone", "override_probability"
"""Keys in the evidence: the chance that the rule alone would have kept it this time, and that of an audit."""


def survival(p: float, epsilon: float) -> float:
    """Return p + (1 - p) epsilon: chance to survive when removals are overridden with probability `epsilon`.

    `p` is the chance to survive the rule alone, 0 or 1 if it is not random. For survivors of the rule and of an
    override alike, the inverse of this probability is the Horvitz-Thompson weight: epsilon if a deterministic rule was
    overridden, 1 if it keeps, and in between for a random rule.
    """
    return p + (1 - p) * epsilon


def keep_probability(verdict: Verdict) -> float:
    """Return the chance that the rule of this verdict would keep."""
    return verdict.probability if verdict.keep else 1 - verdict.probability


class RuleError(ValueError):
    """A rule raised, or returned something other than verdicts; the message names the gate."""


@dataclass(frozen=True)
class NamedRule:
    """A rule with its gate's name and its overrides, as the rollout runner calls it."""

    name: str
    rule: Rule
    overrides: Overrides | None = None

    def decide(self, views: Sequence[GroupView]) -> list[Decision]:
        """Return decisions on views, in their order. Raises RuleError."""
        try:
            verdicts = self.rule.decide(views)
        except Exception as error:
            what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise RuleError(f"gate {self.name}: {what}{str(error).removeprefix(f'gate {self.name}: ')}") from error
        self._check(verdicts, len(views))
        decisions = []
        for view, verdict in zip(views, verdicts, strict=True):
            if self.overrides is not None:
                earlier = [d for d in view.decisions if d.gate == self.name]
                verdict = self.overrides.apply(view, verdict, earlier)
            decisions.append(Decision(self.name, view.at, verdict, view.turn))
        return decisions

    def _check(self, verdicts: Any, n: int) -> None:
        if (
            not isinstance(verdicts, Sequence)
            or len(verdicts) != n
            or not all(isinstance(v, Verdict) for v in verdicts)
        ):
            raise RuleError(f"gate {self.name}: decide must give a list of {n} verdicts, not {verdicts!r:.200}")
        for verdict in verdicts:
            if not 0 < verdict.probability <= 1:
                raise RuleError(
                    f"gate {self.name}: a verdict's probability must lie in (0, 1], not {verdict.probability}"
                )
            for key, value in verdict.evidence.items():
                if not isinstance(value, EVIDENCE) or (isinstance(value, float) and not math.isfinite(value)):
                    raise RuleError(
                        f"gate {self.name}: evidence '{key}' must be a finite number, a text or an array, not "
                        f"{value!r:.100}"
                    )


EVIDENCE = (float, int, str, type(None), np.ndarray, np.generic)
"""Types of evidence, which travels with the verdict and is part of checkpoints."""


AT_TOKENS = frozenset({"hidden", "logp", "raw_logp", "text"})
"""Capabilities of which a view has something at a token only."""


def check_rule(named: NamedRule) -> None:
    """Try a rule. Raises RuleError when it cannot be called, or cannot travel to its sampler."""
    at = named.rule.at
    points = at if isinstance(at, tuple) else (at,)
    tokens = [p.n for p in points if isinstance(p, Token)]
    steps = [p.k for p in points if isinstance(p, EnvStep)]
    if len(tokens) + len(steps) != len(points) or not points or (tokens and len(points) > 1) or min(tokens + steps) < 1:
        raise RuleError(
            f"gate {named.name}: a rule's `at` must be one Token(n), or one or several EnvStep(k), from 1 on, not {at}"
        )
    if not isinstance(getattr(named.rule, "needs", None), frozenset | set):
        raise RuleError(
            f"gate {named.name}: a rule needs `needs`, a frozenset of what it asks of the engine, e.g. empty"
        )
    if steps and (unseen := AT_TOKENS & named.rule.needs):
        raise RuleError(
            f"gate {named.name}: at an environment step a rule sees no {', '.join(sorted(unseen))}; leave it out of "
            "`needs` and read `actions` and `observations`, or decide at a Token(n)"
        )
    try:
        json.dumps(rule_state(named), allow_nan=False)
    except Exception as error:  # any objection of pydantic to the class
        raise RuleError(
            f"gate {named.name}: its rule cannot travel as JSON ({type(error).__name__}: {error}); a rule is a frozen "
            "dataclass of plain values, and of arrays annotated `Array`"
        ) from None


def env_steps(rule: Rule) -> tuple[int, ...]:
    """Return the environment steps at which a rule decides; empty for a token."""
    at = rule.at
    if isinstance(at, Token):
        return ()
    return (at.k,) if isinstance(at, EnvStep) else tuple(step.k for step in at)


@lru_cache(maxsize=64)
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def rule_state(named: NamedRule) -> dict[str, Any]:
    """Return a rule as plain JSON values."""
    overrides = named.overrides
    return {
        "name": named.name,
        "rule": _adapter(type(named.rule)).dump_python(named.rule, mode="json"),
        "overrides": None if overrides is None else _adapter(Overrides).dump_python(overrides, mode="json"),
    }


def rule_from(state: Mapping[str, Any], rule: type) -> NamedRule:
    """Return the rule of class `rule` from its `rule_state`."""
    under = state["overrides"]
    overrides = None if under is None else _adapter(Overrides).validate_python(under)
    return NamedRule(state["name"], _adapter(rule).validate_python(state["rule"]), overrides)


def of_gate(decisions: Sequence[Decision], name: str) -> list[Decision]:
    """Return the decisions of the gate with this name."""
    return [d for d in decisions if d.gate == name]
