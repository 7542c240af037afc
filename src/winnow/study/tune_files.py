"""The files of `winnow tune`: a configuration with its reasons, and a page with predicted and measured seconds."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..base.files import write_text
from ..base.machine import processor, usable_threads

WIDTH, BAR, NAME = 360, 12, 420
COLORS = {"predicted": "#E69F00", "measured": "#0072B2"}
"""Okabe and Ito's."""


def write_config(values: Mapping[str, Any], found: Mapping[str, Any], output: Path) -> None:
    """Write the settings of a file with the changes, each below its reason."""
    comments = [f"By `winnow tune` on {processor()}, threads: {usable_threads()}.", *summary(found)]
    lines = [_comment(text) for text in comments]
    for key, value in (dict(values) | found["changes"]).items():
        if key in found["changes"]:
            was = _setting(key, values[key]) if key in values else f"{key}: default"
            lines += ["", _comment(f"was {was}; {found['reasons'][key]}")]
        lines.append(_setting(key, value))
    write_text(output, "\n".join(lines) + "\n")


def _comment(text: str) -> str:
    return "# " + " ".join(text.split())


def _setting(key: str, value: Any) -> str:
    """Return `key: value` as YAML on one line, but for texts with several."""
    return yaml.safe_dump({key: value}, default_flow_style=True, sort_keys=False, width=1 << 20).strip()[1:-1]


def summary(found: Mapping[str, Any]) -> list[str]:
    """Return lines on what was found, for comments and a terminal."""
    runs = [run for run in found["runs"] if run["pass@1"]]
    lines = [f"changed: {', '.join(found['changes']) or 'nothing'}"]
    given = next((run for run in runs if run["settings"] == "given"), None)
    if given is not None:
        for run in runs:
            share, passed = run["signal_s"] / given["signal_s"], sum(run["pass@1"]) / len(run["pass@1"])
            lines.append(
                f"{run['settings']}: {run['steps']} steps of {run['step_s']:.3g} s, {share:.2f} of the given seconds "
                f"to equal signal, mean held-out pass@1 {passed:.3f}"
            )
    errors = [abs(run["error"]) for run in found["runs"] if run["error"] is not None]
    if errors:
        lines.append(
            f"predicted seconds of a step in {len(errors)} runs that were not fitted: off by {max(errors):.0%} at most"
        )
    return lines + list(found["notes"])


def write_page(found: Mapping[str, Any], output: Path) -> None:
    """Write one HTML page: a bar chart of seconds of a step, and the costs behind the predictions."""
    rows = [(run["settings"], run["predicted_step_s"], run["step_s"]) for run in found["runs"]]
    ran = {name for name, *_ in rows}
    rows += [(each["settings"], each["step_s"], None) for each in found["predicted"] if each["settings"] not in ran]
    most = max(x for _, *seconds in rows for x in seconds if x is not None)
    parts, y = [], 0
    for name, *seconds in rows:
        parts.append(f'<text x="{NAME - 8}" y="{y + BAR + 4}" text-anchor="end">{html.escape(name)}</text>')
        for kind, value in zip(COLORS, seconds, strict=True):
            if value is not None:
                width = WIDTH * value / most
                bar = f'<rect x="{NAME}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLORS[kind]}"/>'
                parts.append(f'{bar}<text x="{NAME + width + 6:.1f}" y="{y + BAR - 1}">{value:.3g} s</text>')
            y += BAR + 2
        y += BAR
    costs = "".join(
        f"<tr><td>{phase}</td><td>{name.replace('_', ' ')}</td><td>{1e6 * cost:.3g}</td></tr>"
        for phase, of in found["costs_s"].items()
        for name, cost in of.items()
    )
    key = " ".join(f'<b style="color:{color}">{kind}</b>' for kind, color in COLORS.items())
    notes = "".join(f"<li>{html.escape(line)}</li>" for line in summary(found))
    write_text(
        output,
        f'<!doctype html><meta charset="utf-8"><title>winnow tune</title><style>body{{font:14px sans-serif;margin:2em}}'
        f"td{{padding:0 1em 0 0}}</style><h1>winnow tune</h1><ul>{notes}</ul><h2>Seconds of a step, {key}</h2>"
        f'<svg width="{NAME + WIDTH + 90}" height="{y}" font-size="11">{"".join(parts)}</svg>'
        f"<h2>Costs, microseconds</h2><table>{costs}</table>\n",
    )
