"""Builds gates from configuration values."""

from __future__ import annotations

from ..config import ConfigError, RunConfig, method, name_of
from ..methods.gate import GATES, Gate, GateContext, NamedRule, RuleError, check_rule
from ..methods.gate.audit import AuditedGate, RuleAudit
from ..methods.group_kind import GroupJudge


def gate_names(c: RunConfig) -> list[str]:
    """Return the names of the run's gates: those of the methods without a path, numbered if repeated."""
    names = [name_of(spec).rpartition(":")[2] for spec in c.gates]
    return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def rule_types(c: RunConfig) -> dict[str, type]:
    """Return the classes of the rules that gates publish, by gate."""
    contexts = [GateContext(name) for name in gate_names(c)]
    gates = [method(GATES, spec, "gates").build(context) for spec, context in zip(c.gates, contexts, strict=True)]
    return {context.name: type(gate.rule()) for context, gate in zip(contexts, gates, strict=True)}


def build_gates(c: RunConfig, judge: GroupJudge) -> dict[str, Gate]:
    """Build the gates of a run, by name. Raises ConfigError naming the option."""
    gates: dict[str, Gate] = {}
    for spec, name in zip(c.gates, gate_names(c), strict=True):
        gate = method(GATES, spec, "gates").build(GateContext(name, c.seed, judge))
        if not isinstance(gate, Gate):
            raise ConfigError(
                f"gates: {name_of(spec)} builds a {type(gate).__name__}, not a Gate; derive from "
                "winnow.methods.gate.Gate, which has defaults for all but `rule`"
            )
        try:
            check_rule(NamedRule(name, gate.rule()))
        except RuleError as error:
            raise ConfigError(f"gates: {error}") from None
        if c.audit is not None:
            audit = RuleAudit(name, c.audit.epsilon, c.audit.max_signal_loss, seed=c.seed)
            gate = AuditedGate(gate, audit, judge)
        gates[name] = gate
    return gates
