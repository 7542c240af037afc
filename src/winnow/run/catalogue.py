"""Catalogue behind `winnow methods`, read from the method tables and their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from ..engine import ENGINES
from ..learner import LEARNERS
from ..methods.advantage import ADVANTAGES
from ..methods.correct import CORRECTIONS, STEP_SCALES
from ..methods.filter import FILTERS
from ..methods.gate import GATES
from ..methods.select import SELECTORS
from ..methods.size import ROLLOUT_BATCHES, SIZES
from ..sampler import SYNCS
from ..tasks import ENVS

TABLES: dict[str, Mapping[str, type]] = {
    "env": ENVS,
    "selector": SELECTORS,
    "rollout_batch": ROLLOUT_BATCHES,
    "group_size": SIZES,
    "sync": SYNCS,
    "engine": ENGINES,
    "gates": GATES,
    "filter": FILTERS,
    "advantage": ADVANTAGES,
    "correction": CORRECTIONS,
    "step_scale": STEP_SCALES,
    "learner": LEARNERS,
}
"""Config field -> its table, in the order a rollout passes them."""

METHOD_TABLES = {key: table for key, table in TABLES.items() if key not in ("env", "engine")}
"""Tables of methods that are built from options alone: tasks may be objects, and an engine may be `auto`."""


def all_methods() -> list[dict[str, Any]]:
    """Return an entry per method: `field, name, summary, file, options` (option -> default), maybe `provides`."""
    found = []
    for field, table in TABLES.items():
        for name in table:
            cls = table[name]
            summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
            file = cls.__module__.replace(".", "/") + ".py"
            entry = {"field": field, "name": name, "summary": summary, "file": file, "options": options(cls)}
            provides = getattr(cls, "provides", None)
            found.append(entry | ({"provides": sorted(provides)} if provides else {}))
    return found


def options(cls: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's options; `required` for those without."""
    defaults: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            defaults[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            defaults[f.name] = f.default_factory()
        else:
            defaults[f.name] = "required"
    return defaults
