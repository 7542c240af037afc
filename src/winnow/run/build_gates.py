"""Gates from configuration values, and refusals of what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import ConfigError, RunConfig, method, name_of
from ..methods.gate import GATES, Gate, GateContext, NamedRule, RuleError, check_rule
from ..methods.gate.audit import AuditedGate, RuleAudit
from ..methods.gate.divergence import Divergence
from ..methods.gate.quality import Arrol
from ..methods.group_kind import GroupJudge
from ..types import Prompt


def gate_names(c: RunConfig) -> list[str]:
    """Names of the run's gates: those of the methods, without a path, numbered where one is there twice."""
    names = [name_of(spec).rpartition(":")[2] for spec in c.gates]
    return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def rule_types(c: RunConfig) -> dict[str, type]:
    """Classes of the rules that gates publish, by gate."""
    contexts = [GateContext(name) for name in gate_names(c)]
    gates = [method(GATES, spec, "gates").build(context) for spec, context in zip(c.gates, contexts, strict=True)]
    return {context.name: type(gate.rule()) for context, gate in zip(contexts, gates, strict=True)}


def build_gates(c: RunConfig, judge: GroupJudge, prompts: Sequence[Prompt], smallest: int) -> dict[str, Gate]:
    """The gates of a run, by name. `smallest`: rollouts of the smallest group that may be launched.

    Raises ConfigError naming the option.
    """
    options = [method(GATES, spec, "gates") for spec in c.gates]
    for given in options:
        if isinstance(given, Divergence):
            _check_task_types(given, prompts)
            if c.audit is None and given.refit_every:
                raise ConfigError(
                    "gates: refit_every needs audits, to see what the gate cuts; set audit: {epsilon: 0.2}, or "
                    "remove it"
                )
        if isinstance(given, Arrol):
            _check_pruning(given, c, judge.least, smallest)
    if sum(isinstance(given, Arrol) for given in options) > 1:
        raise ConfigError("gates: arrol can be there once: two would draw the same numbers; remove one")
    gates: dict[str, Gate] = {}
    for given, name in zip(options, gate_names(c), strict=True):
        gate = given.build(GateContext(name, c.seed, judge))
        try:
            check_rule(NamedRule(name, gate.rule()))
        except RuleError as error:
            raise ConfigError(f"gates: {error}") from None
        if c.audit is not None:
            audit = RuleAudit(name, c.audit.epsilon, c.audit.max_signal_loss, seed=c.seed)
            gate = AuditedGate(gate, audit, judge)
        gates[name] = gate
    return gates


def _check_pruning(o: Arrol, c: RunConfig, needed: int, smallest: int) -> None:
    least = needed if o.min_survivors is None else o.min_survivors
    if o.at is not None and o.at >= c.max_completion_length:
        raise ConfigError(
            f"gates: arrol: at: {o.at} comes after max_completion_length={c.max_completion_length}, so nothing would "
            "be pruned; lower it, or leave it out"
        )
    if least >= smallest:
        raise ConfigError(
            f"gates: arrol: min_survivors: {least} of groups that may have only {smallest} rollouts leaves "
            "nothing to prune; lower it, or raise num_generations"
        )
    if not o.unbiased:
        return
    if len(c.gates) > 1:
        raise ConfigError("gates: arrol: unbiased weights know of no other gate; remove the others, or unbiased")
    if any(name_of(spec) != "keep_all" for spec in (c.filter if isinstance(c.filter, list) else [c.filter])):
        raise ConfigError(
            "gates: arrol: unbiased cannot weigh a batch from which a filter took groups by what their survivors got; "
            "set filter: keep_all, or remove unbiased"
        )
    if c.mask_truncated_completions:
        raise ConfigError(
            "gates: arrol: unbiased cannot know which pruned completions would have been truncated; set "
            "mask_truncated_completions: false, or remove unbiased"
        )
    if least < needed:
        raise ConfigError(
            f"gates: arrol: unbiased with min_survivors: {least} would lose groups that are left with fewer than "
            f"{needed}; set it to that, or leave it out"
        )


def _check_task_types(options: Divergence, prompts: Sequence[Prompt]) -> None:
    types = {p.columns.get(options.task_type) for p in prompts} if options.per_task_type else set()
    known = {str(name) for name in types if name is not None}
    if unknown := sorted(set(options.per_task_type) - known):
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"gates: per_task_type: no training prompt has {options.task_type} '{unknown[0]}'; there: {there}"
        )
