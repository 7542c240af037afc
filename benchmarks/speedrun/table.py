"""Seconds to the target from the records of a track: a table, its JSON, and the plot of all tracks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tables as t
from harness import read_json, write_json
from speedrun.tracks import SIDES, TUNING_SEED
from tables import Column, Figures, Summary

TUNED = "tuned.json"


def reached_s(curve: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Return the seconds at the end of the step from which on the lower bound stays over the target; None: never."""
    since: float | None = None
    for point in curve:
        if point["low"] <= target:
            since = None
        elif since is None:
            since = point["seconds"]
    return since


def mean_over_the_clock(curve: Sequence[Mapping[str, float]]) -> float:
    """Return the mean of pass@1 over the seconds of a run."""
    seconds, passed = (np.array([point[key] for point in curve]) for key in ("seconds", "pass@1"))
    return float(np.trapezoid(passed, seconds) / seconds[-1])


def summary_of(record: Mapping[str, Any], target: float) -> Summary:
    """Return what the table needs of a run."""
    curve, last = record["curve"], record["curve"][-1]
    return {
        "seed": record["seed"],
        "rate": record["rate"],
        "reached_s": reached_s(curve, target),
        "pass@1": last["pass@1"],
        "pass@8": last["pass@8"],
        "mean_pass@1": mean_over_the_clock(curve),
        "seconds": record["seconds"],
        "steps": record["steps"],
        "loading_s": record["loading_s"],
        "tokens": record["tokens"],
        "cpu": record["machine"]["accelerator"] or record["machine"]["cpu"],
        "load_average": record["load_average"],
    }


PRECISION = 1.1
"""Times to the target that differ by less say nothing: models are saved at least as far apart."""


def chosen_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of each side at its chosen rate (any rate until it is tuned), without the tuning seed's."""
    tuned = read_json(directory / TUNED)
    records = [read_json(file) for file in sorted(directory.glob("*.json")) if file.name != TUNED]
    return [
        record
        for record in records
        if record["seed"] != TUNING_SEED
        and (record["side"] not in tuned or record["rate"] == tuned[record["side"]]["rate"])
    ]


def figures_in(directory: Path, target: float) -> Figures:
    """Return the summaries of the chosen runs by side."""
    runs = sorted(chosen_records(directory), key=lambda record: record["seed"])
    figures = {side: [summary_of(run, target) for run in runs if run["side"] == side] for side in SIDES}
    return {side: of_side for side, of_side in figures.items() if of_side}


def chosen(tries: Sequence[Summary]) -> Summary:
    """Return the try with the best mean over its run, of those that reach the target first, if any does."""
    first = min(run["reached_s"] or float("inf") for run in tries)
    alike = [run for run in tries if (run["reached_s"] or float("inf")) <= PRECISION * first]
    return max(alike, key=lambda run: run["mean_pass@1"])


def markdown(figures: Figures) -> str:
    """Return the table. A ratio is over the seeds on which both sides reach the target."""

    def seconds(runs: list[Summary], _: list[Summary]) -> str:
        missed = sum(run["reached_s"] is None for run in runs)
        note = f"{missed} of {len(runs)} did not reach it" if missed else ""
        return "; ".join(filter(None, (t.text(t.over_seeds(runs, "reached_s"), "{:.0f}"), note)))

    def ratio_to(base: str) -> Column:
        others = figures.get(base, [])

        def cell(runs: list[Summary], _: list[Summary]) -> str:
            return t.text(t.against(runs, others, "reached_s", as_ratio=True), t.TWO)

        return Column(f"ratio to {base}", cell)

    columns = (
        t.SEEDS,
        Column("seconds to the target", seconds),
        ratio_to("dapo"),
        ratio_to("trl"),
        t.mean("final pass@1", "pass@1"),
        t.mean("final pass@8", "pass@8"),
        t.mean("loading, s", "loading_s", "{:.1f}"),
        *(t.mean(f"{kind} tokens", f"tokens.{kind}", "{:.2f}M", 1e-6) for kind in ("sampled", "computed", "trained")),
    )
    return t.table_of(figures, columns, head="side")


def write(out: Path, name: str, figures: Figures, target: float) -> str:
    """Update a track's part of the results file; return its table."""
    table = markdown(figures)
    write_json(out, read_json(out) | {name: {"target": target, "table": table.splitlines(), "runs": figures}})
    return table


def draw(folder: Path, targets: Mapping[str, float], path: Path) -> None:
    """Plot held-out pass@1 against seconds: each run thin, a side's mean up to the end of its shortest run."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {name: records for name in targets if (records := chosen_records(folder / name))}
    if not shown:
        return
    rows, width = -(-len(shown) // 2), min(2, len(shown))
    figure, axes = plt.subplots(rows, width, figsize=(6 * width, 4 * rows), squeeze=False, constrained_layout=True)
    for axis, (name, records) in zip(axes.flat, shown.items(), strict=False):
        for number, side in enumerate(SIDES):
            curves = [record["curve"] for record in records if record["side"] == side]
            if curves:
                _draw_side(axis, f"C{number}", f"{side} (n={len(curves)})", curves)
        axis.axhline(targets[name], color="grey", linestyle=":", label="target of the lower bound")
        axis.set(title=name, xlabel="seconds", ylabel="held-out pass@1")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    figure.savefig(path, dpi=80)


def _draw_side(axis: Any, color: str, label: str, curves: Sequence[Sequence[Mapping[str, float]]]) -> None:
    lines = [([p["seconds"] for p in curve], [p["pass@1"] for p in curve]) for curve in curves]
    for seconds, passed in lines:
        axis.plot(seconds, passed, color, alpha=0.25, linewidth=0.8)
    grid = np.linspace(0, min(seconds[-1] for seconds, _ in lines), 200)
    mean = np.mean([np.interp(grid, *line) for line in lines], axis=0)
    axis.plot(grid, mean, color, label=label)
