"""Tables and curves of the collapse study, from the run directories of `async_claims.py` and earlier figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import claims_figures as f
import numpy as np
from arms import fill, table
from claims_figures import Run, Runs
from claims_tables import text

Figures = dict[str, list[dict[str, Any]]]
"""By arm, what `_summary` says of every seed."""
SYNC, LAG = "lag0-tis8", "lag12-"
CHARTS = {
    "held-out pass@1": "eval/pass@1",
    "effective sample size / rollouts": "ess_ratio/with_gradient",
    "KL sampler to learner, nats a token": "sampling/kl",
    "gradient norm": "grad_norm",
}
SHOWN = ("ess_ratio/with_gradient", "sampling/kl", "grad_norm", "effective_learning_rate")
"""Metrics of a run whose medians over the steps are in its summary."""
DRAWN = (SYNC, "lag12-plain", "lag12-tis8", "lag12-ess-only", "lag12-opob-only", "lag12-vcpo")


def write_figures(
    work: Path, arms: Sequence[str], *, out: Path | None, docs: Path | None, picture: Path | None
) -> None:
    """Arms without a finished run are as they were in `out`, or left out; `picture` has those of `work` alone."""
    runs, _ = f.read_runs(work, arms)
    said = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    for arm, found in runs.items():
        said[arm] = {"runs": [_summary(r) for r in found.values()], "curves": _curves(found)}
    figures = {arm: said[arm]["runs"] for arm in arms if arm in said}
    if out is not None:
        out.write_text(json.dumps({arm: said[arm] for arm in figures}, indent=1), encoding="utf-8")
    if docs is not None:
        fill(docs, {"async-methods": _methods(figures), "async-lags": _lags(figures)})
    if picture is not None:
        draw(runs, picture)


def _methods(runs: Figures) -> str:
    rows = []
    for arm, found in runs.items():
        if arm != SYNC and not arm.startswith(LAG):
            continue
        rows.append(
            [
                "no lag, tis8" if arm == SYNC else arm.removeprefix(LAG),
                f"{sum(run['collapsed'] for run in found)} of {len(found)}",
                text(_over_seeds(found, "pass@1")),
                text(_difference(found, runs[SYNC]), "{:+.3f}") if SYNC in runs and arm != SYNC else "",
                text(_over_seeds(found, "greedy")),
                text(_over_seeds(found, "ess_ratio/with_gradient")),
                text(_over_seeds(found, "sampling/kl"), "{:.4f}"),
                text(_over_seeds(found, "grad_norm"), "{:.2f}"),
                text(_over_seeds(found, "effective_learning_rate"), "{:.2f}", 1e4),
            ]
        )
    head = ["variant", "collapsed", "final pass@1", "against no lag", "greedy", "ESS ratio", "KL", "gradient norm"]
    return table([*head, "learning rate, 1e-4"], rows)


def _over_seeds(found: list[dict[str, Any]], key: str) -> f.Interval | None:
    return f.interval([run[key] for run in found])


def _difference(found: list[dict[str, Any]], base: list[dict[str, Any]]) -> f.Interval | None:
    """In final pass@1, paired by seed."""
    of_base = {run["seed"]: run["pass@1"] for run in base}
    return f.interval([run["pass@1"] - of_base[run["seed"]] for run in found if run["seed"] in of_base])


def _lags(runs: Figures) -> str:
    lags = sorted({int(arm.removeprefix("lag").split("-")[0]) for arm in runs})
    rows = []
    for variant in ("tis8", "vcpo"):
        for measure, key in (("final pass@1", "pass@1"), ("ESS ratio", "ess_ratio/with_gradient")):
            cells = [runs.get(f"lag{lag}-{variant}", []) for lag in lags]
            rows.append([variant, measure, *(text(_over_seeds(found, key)) if found else "" for found in cells)])
    return table(["variant", "", *(f"lag {lag}" for lag in lags)], rows)


def _final(run: Run) -> float:
    return run.deployed["pass@1"]


def _collapsed(run: Run) -> bool:
    """It has ended with less than half of the held-out pass@1 that it started with."""
    return _final(run) < run.data.curve[0].passed / 2


def _middle(run: Run, key: str) -> float:
    """Median over the steps."""
    return float(np.median(f.series(run, key)))


def _curves(found: dict[int, Run]) -> dict[str, list[float]]:
    return {key: [round(v, 6) for v in _mean_of(found, key)[1]] for key in CHARTS.values()}


def _mean_of(found: dict[int, Run], key: str) -> tuple[list[float], list[float]]:
    """Steps and means over seeds, for as long as all of them have a value; a run that was stopped ends a curve."""
    if key == "eval/pass@1":
        series = [[(p.step, p.passed) for p in run.data.curve] for run in found.values()]
    else:
        series = [[(row["step"], row[key]) for row in run.rows if key in row] for run in found.values()]
    points = [list(zip(*at, strict=True)) for at in zip(*series, strict=False)]
    return [steps[0] for steps, _ in points], [float(np.mean(values)) for _, values in points]


def _summary(run: Run) -> dict[str, Any]:
    return {
        "seed": run.data.seed,
        "pass@1": _final(run),
        "collapsed": _collapsed(run),
        "greedy": run.deployed["greedy"],
        "best held-out pass@1": max(p.passed for p in run.data.curve),
        "steps": len(run.rows),
        **{key: _middle(run, key) for key in SHOWN},
    }


def draw(runs: Runs, path: Path) -> None:
    """Means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), constrained_layout=True)
    smooth: Callable[[list[float]], Any] = lambda v: np.convolve(v, np.ones(5) / 5, mode="valid")  # noqa: E731
    for axis, (title, key) in zip(axes.flat, CHARTS.items(), strict=True):
        for arm in (arm for arm in DRAWN if arm in runs):
            steps, values = _mean_of(runs[arm], key)
            name = "no lag" if arm == SYNC else arm.removeprefix(LAG)
            if key == "eval/pass@1":
                axis.plot(steps, values, label=name, marker="o", markersize=3)
            elif len(values) >= 5:
                axis.plot(steps[2:-2], smooth(values), label=name)
        axis.set_title(title)
        axis.set_xlabel("optimizer step")
        if key in ("sampling/kl", "grad_norm"):
            axis.set_yscale("log")
        if key == "sampling/kl":
            axis.set_ylim(bottom=1e-2)  # without a lag it is rounding
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
