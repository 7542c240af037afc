"""From configuration values to gates, and what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import ConfigError, RunConfig, method
from ..methods.advantage import Advantage
from ..methods.gate import GATES, Gate
from ..methods.gate.divergence import Divergence, DivergenceGate
from ..methods.gate.quality import Arrol, ArrolGate
from ..types import Prompt


def build_gates(c: RunConfig, advantage: Advantage, prompts: Sequence[Prompt], smallest: int) -> list[Gate]:
    """`smallest`: rollouts of the smallest group that may be launched. Raises ConfigError naming the option."""
    options = [method(GATES, spec, "gates") for spec in c.gates]
    for given in options:
        if isinstance(given, Divergence):
            _check_task_types(given, prompts)
    gates: list[Gate] = [given.build(c.seed) for given in options]
    if c.audit is None and any(isinstance(gate, DivergenceGate) and gate.refit is not None for gate in gates):
        raise ConfigError(
            "gates: refit_every needs audits, to see what the gate cuts; set audit: {epsilon: 0.2}, or remove it"
        )
    if sum(isinstance(given, Arrol) for given in options) > 1:
        raise ConfigError("gates: arrol can be there once: two would draw the same numbers; remove one")
    for gate in gates:
        if isinstance(gate, ArrolGate):
            gate.success_reward = c.success_reward
            if gate.options.min_survivors is None:
                gate.least = advantage.smallest_group
            _check_pruning(gate, c, advantage, smallest)
    return gates


def _check_pruning(gate: ArrolGate, c: RunConfig, advantage: Advantage, smallest: int) -> None:
    o = gate.options
    if o.at is not None and o.at >= c.max_completion_length:
        raise ConfigError(
            f"gates: arrol: at: {o.at} comes after max_completion_length={c.max_completion_length}, so nothing would "
            "be pruned; lower it, or leave it out"
        )
    if gate.least >= smallest:
        raise ConfigError(
            f"gates: arrol: min_survivors: {gate.least} of groups that may have only {smallest} rollouts leaves "
            "nothing to prune; lower it, or raise num_generations"
        )
    if not o.unbiased:
        return
    if len(c.gates) > 1:
        raise ConfigError("gates: arrol: unbiased weights know of no other gate; remove the others, or unbiased")
    if c.mask_truncated_completions:
        raise ConfigError(
            "gates: arrol: unbiased cannot know which pruned completions would have been truncated; set "
            "mask_truncated_completions: false, or remove unbiased"
        )
    if gate.least < advantage.smallest_group:
        raise ConfigError(
            f"gates: arrol: unbiased with min_survivors: {gate.least} would lose groups that are left with fewer than "
            f"{advantage.smallest_group}; set it to that, or leave it out"
        )


def _check_task_types(options: Divergence, prompts: Sequence[Prompt]) -> None:
    types = {p.columns.get(options.task_type) for p in prompts} if options.per_task_type else set()
    known = {str(name) for name in types if name is not None}
    if unknown := sorted(set(options.per_task_type) - known):
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"gates: per_task_type: no training prompt has {options.task_type} '{unknown[0]}'; there: {there}"
        )
