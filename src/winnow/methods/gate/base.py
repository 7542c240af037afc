"""Gates: a rule next to the engine decides, and the gate learns in the training loop.

gate.rule() -> Rule            frozen within an optimizer step; published to samplers with the weights
rule.decide(views)             next to the engine: stop this rollout, or this group?
gate.observe_group(group)      in the training loop: learn from the decisions in a finished group
gate.end_step()                in the training loop: update; the next `rule()` may differ
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from ...base.array_json import pack, unpack
from ...types import Decision, EnvStep, GatePoint, Group, GroupView, Token, Verdict
from ..base import LearningMethod
from ..group_kind import BY_REWARDS, GroupJudge
from .overrides import Overrides

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
        found = []
        for view, verdict in zip(views, verdicts, strict=True):
            if self.overrides is not None:
                earlier = [d for d in view.decisions if d.gate == self.name]
                verdict = self.overrides.apply(view, verdict, earlier)
            found.append(Decision(self.name, view.at, verdict, view.turn))
        return found

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
