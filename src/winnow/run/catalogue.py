"""Catalogue behind `winnow methods`, read from the method tables."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from ..engine import ENGINES
from ..learner import LEARNERS
from ..methods import tables
from ..sampler import SYNCS
from ..tasks import ENVS

_TABLES = {"env": ENVS, "sync": SYNCS, "engine": ENGINES, "learner": LEARNERS, **tables.TABLES}
_ORDER = (
    *("env", "selector", "rollout_batch", "group_size", "sync", "engine"),
    *("gates", "filter", "advantage", "correction", "step_scale", "learner"),
)
TABLES: dict[str, Mapping[str, type]] = {key: _TABLES[key] for key in _ORDER}
"""Config field -> its table, in the order a rollout passes them."""


def all_methods() -> list[dict[str, Any]]:
    """Return an entry per method: `field, name, summary, file, options` (option -> default), maybe `provides`."""
    entries = []
    for key, table in TABLES.items():
        for name in table:
            cls = table[name]
            summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
            file = cls.__module__.replace(".", "/") + ".py"
            entry = {"field": key, "name": name, "summary": summary, "file": file, "options": defaults_of(cls)}
            provides = getattr(cls, "provides", None)
            entries.append(entry | ({"provides": sorted(provides)} if provides else {}))
    return entries


def defaults_of(cls: type) -> dict[str, Any]:
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
