"""How much lag each method tolerates: the recipe `countdown-lag`, variants at a lag of twelve, truncation at every lag.

VCPO, its parts and mixed lags are in `vcpo_claims`: they were run again, on another machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tables as t
from families.base import Arm, Family, Said, Start
from runs import Run
from tables import Column, Figures, Summary

RECIPE = "countdown-lag"
LAG = 12
"""At which every variant runs."""
VARIANTS = (
    *("plain", "tis2", "tis8", "tis-token", "mis", "deepseek", "m2po", "gspo"),
    *("opo", "otb", "opob-only", "low-lr", "kl"),
)
SWEEP = "tis8"
LAGS = (2, 4, 8, 16)
"""Further lags of the variant `SWEEP`."""
START = Start(RECIPE, {"max_steps": 270})
SYNC, LAGGED = "lag0-tis8", f"lag{LAG}-"
EVAL_STEPS = 20
"""As in the recipe."""
CHARTS = {
    "held-out pass@1": "eval/pass@1",
    "effective sample size / rollouts": "ess_ratio/with_gradient",
    "KL sampler to learner, nats a token": "sampling/kl",
    "gradient norm": "grad_norm",
}
MEDIANS = ("ess_ratio/with_gradient", "sampling/kl", "grad_norm", "effective_learning_rate")
"""Metrics of a run whose medians over the steps are in its summary."""
DRAWN = (SYNC, "lag12-tis8", "lag12-otb", "lag12-ess-only", "lag12-vcpo")


def arm(variant: str, lag: int, *, mixed: bool = False) -> Arm:
    overrides = (f"variant={variant}", f"max_lag={lag}")
    if mixed:
        overrides = (*overrides, "sync={name: in_process, lag: mixed}")
    return Arm(f"lag{lag}-{variant}{'-mixed' if mixed else ''}", RECIPE, overrides, START)


ARMS = (
    arm("tis8", 0),
    *(arm(variant, LAG) for variant in VARIANTS),
    *(arm(SWEEP, lag) for lag in LAGS),
)


def summary(run: Run) -> Summary:
    """Collapsed: ended with less than half of the held-out pass@1 that it started with."""
    final = run.deployed["pass@1"]
    return {
        "seed": run.seed,
        "pass@1": final,
        "collapsed": final < run.data.curve[0].passed / 2,
        "greedy": run.deployed["greedy"],
        "best held-out pass@1": max(p.passed for p in run.data.curve),
        "steps": len(run.rows),
        **{key: float(np.median(run.series(key))) for key in MEDIANS},
    }


def curves(runs: list[Run]) -> dict[str, list[float]]:
    """Means over seeds, for as long as all of them have a value; a run that was stopped ends a curve."""
    found = {}
    for key in CHARTS.values():
        of_seeds = [run.series(key) for run in runs]
        if key == "eval/pass@1":
            of_seeds = [[p.passed for p in run.data.curve] for run in runs]
        found[key] = [round(float(np.mean(values)), 6) for values in zip(*of_seeds, strict=False)]
    return found


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    """An arm that has runs in the work directory has those alone."""
    new = {name: {"runs": [summary(run) for run in found], "curves": curves(found)} for name, found in runs.items()}
    return said | new


COLUMNS = (
    Column("collapsed", lambda runs, base: f"{sum(run['collapsed'] for run in runs)} of {len(runs)}"),
    t.mean("final pass@1", "pass@1"),
    t.difference("against no lag", "pass@1"),
    t.mean("greedy", "greedy"),
    t.mean("ESS ratio", "ess_ratio/with_gradient"),
    t.mean("KL", "sampling/kl", "{:.4f}"),
    t.mean("gradient norm", "grad_norm", t.TWO),
    t.mean("learning rate, 1e-4", "effective_learning_rate", t.TWO, 1e4),
)


def lags_table(runs: Figures) -> str:
    lags = (0, *sorted({LAG, *LAGS}))
    rows = []
    for measure, key in (("final pass@1", "pass@1"), ("ESS ratio", "ess_ratio/with_gradient")):
        cells = [t.over_seeds(runs.get(f"lag{lag}-{SWEEP}", []), key) for lag in lags]
        rows.append([SWEEP, measure, *("" if cell is None else t.text(cell) for cell in cells)])
    return t.markdown(["variant", "", *(f"lag {lag}" for lag in lags)], rows)


def variants_table(runs: Figures, arms: tuple[Arm, ...]) -> str:
    names = [arm.name for arm in arms if arm.name in runs and (arm.name == SYNC or arm.name.startswith(LAGGED))]

    def shown(name: str) -> str:
        return "no lag, tis8" if name == SYNC else name.removeprefix(LAGGED)

    return t.table_of(runs, COLUMNS, names, SYNC, shown, "variant")


def figures(said: Said) -> Figures:
    return {name: found["runs"] for name, found in said.items()}


def tables(said: Said) -> dict[str, str]:
    runs = figures(said)
    return {"async-methods": variants_table(runs, ARMS), "async-lags": lags_table(runs)}


def draw(said: Said, path: Path) -> None:
    """Means over seeds; all but the evaluations as means of five steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), constrained_layout=True)
    for axis, (title, key) in zip(axes.flat, CHARTS.items(), strict=True):
        for arm in (arm for arm in DRAWN if arm in said):
            name = "no lag" if arm == SYNC else arm.removeprefix(LAGGED)
            draw_line(axis, said[arm], key, name)
        axis.set_title(title)
        axis.set_xlabel("optimizer step")
        if key in ("sampling/kl", "grad_norm"):
            axis.set_yscale("log")
        if key == "sampling/kl":
            axis.set_ylim(bottom=1e-2)  # without a lag it is rounding
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_line(axis: Any, found: dict[str, Any], key: str, name: str) -> None:
    values = found["curves"][key]
    if key == "eval/pass@1":
        last = min(run["steps"] for run in found["runs"])  # where a run was stopped
        axis.plot([min(i * EVAL_STEPS, last) for i in range(len(values))], values, label=name, marker="o", markersize=3)
    elif len(values) >= 5:
        axis.plot(range(3, len(values) - 1), np.convolve(values, np.ones(5) / 5, mode="valid"), label=name)


FAMILY = Family("async-claims", ARMS, collect, tables, may_stop=True)
