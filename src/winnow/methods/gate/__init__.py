"""Gates: decide during the rollout whether it is worth continuing.

A gate only decides; `rollout/runner.py` does the stopping. `none` means no gate, so it is not in the table.
"""

from __future__ import annotations

from .arrol.gate import Arrol
from .base import Gate, GateContext, NamedRule, Rule, RuleError, check_rule, env_steps, of_gate, rule_from, rule_state
from .divergence import Divergence
from .random_cut import RandomCut

__all__ = [
    "GATES",
    "Gate",
    "GateContext",
    "NamedRule",
    "Rule",
    "RuleError",
    "check_rule",
    "env_steps",
    "of_gate",
    "rule_from",
    "rule_state",
]

GATES: dict[str, type] = {"divergence": Divergence, "random": RandomCut, "arrol": Arrol}
"""Name -> frozen dataclass of options with `build(context) -> Gate`."""
