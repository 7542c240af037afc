"""The tables of methods and tasks whose options need no model: invalid ones are reported before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.errors import ConfigError
from ..config import RunConfig
from ..config.options import MethodSpec, method, name_of
from ..tasks import ENVS
from .advantage import ADVANTAGES
from .correct import CORRECTIONS, STEP_SCALES
from .filter import FILTERS
from .gate import GATES
from .policy_loss import POLICY_LOSSES
from .select import SELECTORS
from .size import ROLLOUT_BATCHES, SIZES

TABLES: dict[str, Mapping[str, type]] = {
    "selector": SELECTORS,
    "rollout_batch": ROLLOUT_BATCHES,
    "group_size": SIZES,
    "gates": GATES,
    "filter": FILTERS,
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "correction": CORRECTIONS,
    "step_scale": STEP_SCALES,
}
"""Config field -> its table."""


def specs_of(c: RunConfig) -> dict[str, list[MethodSpec]]:
    """Return the methods that the configuration names in these tables, by key, as written."""
    given = {key: getattr(c, key) for key in TABLES}
    return {key: value if isinstance(value, list) else [value] for key, value in given.items()}


def options_of(c: RunConfig) -> dict[str, list[Any]]:
    """Return the options of every method that the configuration names in these tables, by key. Raises ConfigError."""
    return {key: [method(TABLES[key], spec, key) for spec in specs] for key, specs in specs_of(c).items()}


def task_options(spec: MethodSpec) -> Any:
    """Return the options of a task by name. Raises ConfigError."""
    if name_of(spec) == "dataset" and "path" not in spec:
        raise ConfigError(
            "env: dataset: no path; give one, or in Python train_dataset, which a run does not keep: give it to "
            "Trainer.resume too"
        )
    return method(ENVS, spec, "env")
