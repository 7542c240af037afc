"""Gates in tests of the runner: real ones, and fakes that only decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from winnow.methods.gate import Gate, GateContext, NamedRule
from winnow.types import Group, GroupView, Token, Verdict

from .builders.audited import Audited


class Fake(Gate):
    """A gate whose rule asks its own `decide(view)`; has `at` and `needs`."""

    at: Any
    needs: frozenset[str] = frozenset()

    def decide(self, view: GroupView) -> Verdict:
        raise NotImplementedError

    def rule(self) -> FakeRule:
        return FakeRule(self)

    def observe_group(self, group: Group) -> None: ...

    def end_step(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class FakeRule:
    fake: Fake

    @property
    def at(self) -> Any:
        return self.fake.at

    @property
    def needs(self) -> frozenset[str]:
        return self.fake.needs

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [self.fake.decide(view) for view in views]


@dataclass(frozen=True)
class BrokenRule:
    n: int
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def at(self) -> Token:
        return Token(self.n)

    def decide(self, views: Sequence[GroupView]) -> list[Verdict]:
        return [Verdict(True, probability=1 / 0)]


class BrokenGate(Fake):
    def __init__(self, n: int) -> None:
        self.n = n

    def rule(self) -> BrokenRule:  # type: ignore[override]
        return BrokenRule(self.n)


@dataclass(frozen=True)
class Broken:
    """A gate by its dotted path, whose rule raises."""

    at: int

    def build(self, context: GateContext) -> BrokenGate:
        return BrokenGate(self.at)


def ask(gate: Gate, view: GroupView) -> Verdict:
    """What the gate's rule of now says."""
    (verdict,) = gate.rule().decide([view])
    return verdict


def plain(verdict: Verdict) -> tuple[Any, ...]:
    """A verdict that can be compared to the last bit, evidence included."""
    evidence = {k: (v.dtype.str, v.tolist()) if isinstance(v, np.ndarray) else v for k, v in verdict.evidence.items()}
    return verdict.keep, verdict.reason, verdict.probability, verdict.override_probability, evidence


def named(gates: Sequence[Gate]) -> list[NamedRule]:
    """What a runner is given: rules by the names of their gates, fakes by those of their classes."""
    return [_named(gate, number) for number, gate in enumerate(gates)]


def _named(gate: Any, number: int) -> NamedRule:
    if isinstance(gate, Audited):
        return NamedRule(gate.audit.name, gate.part.rule(), gate.audit.overrides())
    name = f"{type(gate).__name__}_{number}" if isinstance(gate, Fake) else gate.name
    return NamedRule(name, gate.rule())
