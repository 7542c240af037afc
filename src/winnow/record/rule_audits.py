"""The table of errors of the run's rules, from the metrics of its last step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rich.table import Table

from ..base.sanitize import visible

RuleAudits = dict[str, dict[str, float]]
"""Rule -> figure -> value, as in `RuleAudit.metrics`; unknown figures are absent."""

HEAD = ("rule", "removed", "audited", "precision", "signal lost", "tokens saved", "carried out")
PREFIX = "audit/"


def rules_of(metrics: Mapping[str, float | None]) -> RuleAudits:
    """Return the audits of rules among the metrics of a step."""
    found: RuleAudits = {}
    for key, value in metrics.items():
        rule, _, figure = key.removeprefix(PREFIX).rpartition("/")
        if key.startswith(PREFIX) and rule and isinstance(value, int | float):
            found.setdefault(rule, {})[figure] = value
    return dict(sorted(found.items()))


def rows(rules: RuleAudits) -> list[list[str]]:
    """Return cells under `HEAD`, one row a rule; each estimate with its 95% interval."""

    def share(value: float) -> str:
        return f"{value:.1%}"

    return [
        [
            name,
            f"{figures.get('removed', 0):,.0f}",
            f"{figures.get('audited', 0):,.0f}",
            _estimate(figures, "precision", share),
            _estimate(figures, "signal_lost", share),
            _estimate(figures, "tokens_saved", lambda v: f"{v:,.0f}"),
            share(figures["carried_out"]) if "carried_out" in figures else "unknown",
        ]
        for name, figures in rules.items()
    ]


def _estimate(figures: Mapping[str, float], key: str, text: Callable[[float], str]) -> str:
    """Return an estimate such as `97.1% (88.0%–99.4%)`."""
    value, low, high = (figures.get(k, math.nan) for k in (key, f"{key}_low", f"{key}_high"))
    if math.isnan(low):
        return "unknown"
    interval = f"{text(low)}–{text(high)}"
    if math.isnan(high):
        interval = f"at least {text(low)}"
    if math.isnan(value):
        return f"unknown ({interval})"
    return f"{text(value)} ({interval})"


def rules_table(rules: RuleAudits) -> Table:
    """Return the audits of rules as a table for a rich console."""
    made = Table(title="What the rules got wrong (95% intervals)", title_justify="left")
    for name in HEAD:
        made.add_column(name.replace(" ", "\n"), justify="left" if name == "rule" else "right", no_wrap=True)
    for row in rows(rules):
        made.add_row(*(visible(cell).replace(" (", "\n(") for cell in row))
    return made
