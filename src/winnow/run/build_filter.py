"""Filters from configuration values: one, or all of a list."""

from __future__ import annotations

from ..config import ConfigError, RunConfig, method, name_of
from ..methods.advantage import Advantage
from ..methods.filter import FILTERS, Every, Filter, ZeroVariance
from ..methods.group_kind import GroupJudge


def build_filter(c: RunConfig, advantage: Advantage) -> Filter:
    """Raises ConfigError on a filter without effect beside the others, or one that `advantage` has no use for."""
    specs = c.filter if isinstance(c.filter, list) else [c.filter]
    filters: list[Filter] = [method(FILTERS, spec, "filter") for spec in specs]
    if not filters:
        raise ConfigError("filter: the list is empty; name a filter, or leave filter out")
    names = [name_of(spec) for spec in specs]
    for name, each in zip(names, filters, strict=True):
        if each.wants_signal and not advantage.group_relative:
            raise ConfigError(
                f"filter: {name} takes groups with equal rewards for worthless, but under advantage: "
                f"{name_of(c.advantage)} they teach; choose another filter, or an advantage relative to the group"
            )
    if len(filters) == 1:
        return filters[0]
    try:
        return Every([(name.rpartition(":")[2], each) for name, each in zip(names, filters, strict=True)])
    except ValueError as error:
        raise ConfigError(f"filter: {error}") from None


def tolerance(filter_: Filter) -> float:
    """Within which rewards count as equal in this run: that of the filter that looks for it."""
    filters = [each for _, each in filter_.filters] if isinstance(filter_, Every) else [filter_]
    return max((each.atol for each in filters if isinstance(each, ZeroVariance)), default=GroupJudge.atol)
