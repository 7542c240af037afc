"""A comparison for a terminal, and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..base.files import check_output, write_text
from ..base.sanitize import visible
from ..methods.intervals import Estimate
from .compare import Comparison, Measure, MethodResult
from .report import count_text, render_page

MAX_POINTS = 500
CAUTION = "Intervals are Student's, 95%, over seeds."
COUNTS = ("tokens", "rollouts", "steps")
LABEL_WIDTH, METHOD_WIDTH = 24, 18
"""Terminal columns to which a measure's label is wrapped, and columns that a method needs."""


def render(found: Comparison, width: int) -> RenderableType:
    """Return one row per measure, one column per method: the mean, and below it the comparison with the baseline.

    Methods that do not fit side by side into `width` terminal columns go to further tables below.
    """
    longest = max(len(m.label) for m in found.measures)
    per_table = max(1, (width - min(longest, LABEL_WIDTH)) // METHOD_WIDTH)
    parts = [found.methods[start : start + per_table] for start in range(0, len(found.methods), per_table)]
    explained = (
        f"mean [95% interval]; below it the paired difference (or ratio, ×) to {visible(found.baseline)}. {CAUTION}"
    )
    return Lines(
        *(_table(found, part) for part in parts),
        Text(explained, style="dim"),
        *(Text(f"note: {visible(note)}", style="yellow") for note in found.notes),
    )


def _table(found: Comparison, methods: Sequence[MethodResult]) -> Table:
    table = Table("", show_lines=True, header_style="bold")
    for method in methods:
        table.add_column(Text(f"{visible(method.name)}\n{_seeds(method)}"), justify="right", overflow="fold")
    for m in found.measures:
        cells = []
        for method in methods:
            mean, against, state = cell(found, m, method)
            text = mean + (f"\n{against}" if against else "")
            if len(found.methods) > 2:
                text = text.replace(" [", "\n[").replace(" (", "\n(")
            cells.append(Text(text, style={"good": "green", "bad": "red"}.get(state, "")))
        table.add_row(m.label, *cells)
    return table


def cell(found: Comparison, m: Measure, method: MethodResult) -> tuple[str, str, str]:
    """Return the mean, its baseline comparison, and `good` or `bad` if the interval excludes "no difference"."""
    mean, against = method.means[m.key], method.against[m.key]
    text = "–" if mean is None else _text(mean, m)
    if m.key.endswith("_to_baseline") and method.reached < method.paired:
        few = f"{method.reached} of {method.paired} seeds reached it"
        text = few if mean is None else f"{text} ({few})"
    if method.name == found.baseline:
        return text, "baseline", ""
    if against is None:
        return text, "", ""
    few = "" if against.n == len(method.runs) else f" (of {against.n} pair{'s' if against.n > 1 else ''})"
    return text, _against_text(against, m) + few, _state(against, m)


def write_page(found: Comparison, output: Path) -> None:
    """Write the table, and held-out pass@1 against tokens with a band from the worst to the best seed, atomically.

    Raises FileNotFoundError when the folder of `output` does not exist.
    """
    check_output(output)
    title = "Winnow: " + ", ".join(visible(m.name) for m in found.methods)
    data = {
        "title": title,
        "baseline": visible(found.baseline),
        "measures": [m.label for m in found.measures],
        "caution": CAUTION,
        "notes": [visible(note) for note in found.notes],
        "methods": [
            {
                "name": visible(method.name),
                "seeds": _seeds(method),
                "runs": [visible(run.path) for run in method.runs],
                "cells": [cell(found, m, method) for m in found.measures],
                "curve": _curve(method),
            }
            for method in found.methods
        ],
    }
    write_text(output, render_page(title, data, "dom.js", "charts.js", "compare.js"))


def _curve(method: MethodResult) -> dict[str, list[float]]:
    """Return mean, lowest and highest pass@1 over seeds at each evaluation, and the mean tokens sampled so far.

    It ends with the shortest curve, since a run that solves its task has fewer evaluations.
    """
    points = list(zip(*(run.curve for run in method.runs), strict=False))
    points = points[:-1][:: max(1, -(-len(points) // MAX_POINTS))] + points[-1:]
    passed_PS = np.array([[p.passed for p in at] for at in points])
    tokens_P = np.array([[p.tokens for p in at] for at in points]).mean(axis=1)
    columns = {
        "step": np.array([at[0].step for at in points]),
        "num_tokens": tokens_P,
        "mean": passed_PS.mean(axis=1),
        "low": passed_PS.min(axis=1),
        "high": passed_PS.max(axis=1),
    }
    return {name: [float(f"{v:.9g}") for v in values] for name, values in columns.items()}


def _seeds(method: MethodResult) -> str:
    seeds = [run.seed for run in method.runs]
    shown: Sequence[object] = seeds if len(seeds) <= 8 else [*seeds[:7], "..."]
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, shown))}"


def _number(value: float, m: Measure) -> str:
    return count_text(value) if m.key.split("_")[0] in COUNTS else f"{value:.3f}"


def _text(e: Estimate, m: Measure) -> str:
    interval = f" [{_number(e.low, m)}, {_number(e.high, m)}]" if e.low is not None and e.high is not None else ""
    return _number(e.mean, m) + interval


def _against_text(e: Estimate, m: Measure) -> str:
    form = "×{:.2f}" if m.ratio else "{:+.3f}"
    inner = "{:.2f}" if m.ratio else form
    interval = f" [{inner.format(e.low)}, {inner.format(e.high)}]" if e.low is not None and e.high is not None else ""
    return form.format(e.mean) + interval


def _state(e: Estimate, m: Measure) -> str:
    if e.low is None or e.high is None:
        return ""
    nothing = 1.0 if m.ratio else 0.0
    sign = m.better * ((e.low > nothing) - (e.high < nothing))
    return {1: "good", -1: "bad"}.get(sign, "")
