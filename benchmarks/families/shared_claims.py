"""The arms of `thrifty` that count most, in an engine that decodes together what siblings share.

Here an arm has as many evaluations as its base, so no curve is averaged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import tables as t
from families import thrifty_claims as thrifty
from families.base import Said
from runs import Run
from tables import Figures

DRAFTS = ("speculative=true",)
SMALL = (*thrifty.BAYES, *thrifty.SMALL, *DRAFTS)
TWICE = (*SMALL, *thrifty.TWICE, *thrifty.CLIP)
METHODS = thrifty.METHODS | {
    "bayes-shared": (*thrifty.BAYES, *DRAFTS),
    "mopps-shared": ("selector=thompson", *thrifty.ROUNDS, *DRAFTS),
    "oracle-shared": (*thrifty.ORACLE, *DRAFTS),
    "thrifty-shared": SMALL,
    "thrifty-shared-linear": (*SMALL, *thrifty.LINEAR),
    "thrifty-shared-linear-long": (*SMALL, *thrifty.LINEAR),
    "thrifty-shared-medium-linear": (*thrifty.BAYES, *thrifty.MEDIUM, *DRAFTS, *thrifty.LINEAR),
    "thrifty-shared-wide-linear": (*SMALL, *thrifty.WIDE, *thrifty.LINEAR),
    "thrifty-shared-twice": TWICE,
    "thrifty-shared-twice-linear": (*TWICE, *thrifty.LINEAR),
}
LENGTHS = thrifty.LENGTHS | {"thrifty-shared-linear-long": 4 / 3, "thrifty-shared-wide-linear": 3 / 4}
COMPOSITIONS: dict[str, tuple[tuple[str, float], ...]] = {
    "chain": (("thrifty-shared-twice-linear", 1),),
    "smollm2": (("thrifty-shared-twice", 1),),
    "countdown": (("mopps-shared", 2), ("thrifty-shared-linear", 2)),
    "alfworld": (("mopps-shared", 2), ("thrifty-shared-twice", 0.5)),
}
"""Task -> compositions and their rates."""
DAPO = {"chain": 2, "smollm2": 2, "countdown": 2, "alfworld": 2}
"""The base's best rate."""
PEERS = ("greso", "speed-rl", "backoff", "knapsack", "reinforce-ada", "mopps", "mopps-shared", "oracle-shared")
OTHER_RATES = {"reinforce-ada": 4}
"""Peers whose best rate is not DAPO's."""
TWINS = {thrifty.BASE: "dapo-fixed-shared", "dapo": "dapo-shared"}
"""Base, of which all sampled tokens count, as in an engine that does not share -> the same runs, those decoded."""


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    new: Figures = {}
    for task in thrifty.TASKS:
        for rate in thrifty.RATES:
            for arm in METHODS:
                found = runs.get(thrifty.name_of(arm, rate, task), [])
                for name, decoded in ((arm, arm not in thrifty.BASES), (TWINS.get(arm), True)):
                    if name:
                        figures = [thrifty.summary(run, decoded=decoded) for run in found]
                        new[thrifty.name_of(name, rate, task)] = figures
    return said | {"runs": t.merged(said.get("runs", {}), new, list(new))}


def task_of(name: str, runs: Figures, base: str = thrifty.BASE, rate: float | None = None) -> thrifty.Task:
    """`rate`: of all arms, in the place of the best ones."""
    rates = dict.fromkeys([*METHODS, *TWINS.values()], rate or DAPO[name])
    if rate is None:
        rates |= OTHER_RATES | dict(COMPOSITIONS[name])
    return thrifty.Task(name, runs, base, smooth=False, rates=rates)


PER_TOKEN = (
    t.mean("mixed groups per 1,000 tokens, first tenth", "mixed_per_1000.0", "{:.2f}"),
    t.mean("last tenth", "mixed_per_1000.9", "{:.2f}"),
)


def paired_columns(task: thrifty.Task) -> list[t.Column]:
    return [
        *task.paired_columns(),
        t.Column("seconds to 95% of it", task.to_base(0.95, "seconds")),
        t.ratio("sampled tokens, whole run", lambda run: run["tokens"] + run["accepted"]),
    ]


def tables(said: Said) -> dict[str, str]:
    runs = said["runs"]
    arms = list(dict.fromkeys(arm for of_task in COMPOSITIONS.values() for arm, _ in of_task))
    every = [task_of(name, runs, base) for name in COMPOSITIONS for base in (*thrifty.BASES, *TWINS.values())]
    peers = [task_of("countdown", runs, base) for base in TWINS.values()]
    other = [task_of("chain", runs, base, rate) for rate in (1, 2) for base in (*TWINS, *TWINS.values())]
    made = {
        "shared": thrifty.paired(every, arms, paired_columns),
        "shared-other-rates": thrifty.paired(other, ["thrifty-shared-twice-linear"], paired_columns),
        "shared-peers": thrifty.paired(peers, PEERS, paired_columns),
    }
    for name in COMPOSITIONS:
        task = task_of(name, runs)
        found = {
            thrifty.name_of(arm, rate, name): task.of(arm, rate)
            for arm in (*TWINS, *TWINS.values(), *METHODS)
            for rate in thrifty.RATES
        }
        for table, tuning in ((f"shared-{name}", False), (f"shared-rates-{name}", True)):
            rows = {arm: [run for run in of if (run["seed"] in thrifty.TUNING) is tuning] for arm, of in found.items()}
            if rows := {arm: of for arm, of in rows.items() if of}:
                made[table] = t.table_of(rows, [*task.outcomes(), *PER_TOKEN])
    return made


def draw(said: Said, path: Path) -> None:
    """Held-out pass@1 against decoded tokens: means over the seeds that count."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for name, axis in zip(COMPOSITIONS, axes.flat, strict=True):
        task = task_of(name, said["runs"])
        bases = [(arm, DAPO[name]) for arm in (thrifty.BASE, TWINS[thrifty.BASE])]
        for number, (arm, rate) in enumerate([*bases, *COMPOSITIONS[name]]):
            if curves := [run["curve"] for run in task.of(arm, rate) if run["seed"] not in thrifty.TUNING]:
                tokens = np.linspace(0, min(curve[-1][1] for curve in curves), 60)
                passed = np.mean([[thrifty.at_tokens(curve, x) for x in tokens] for curve in curves], axis=0)
                axis.plot(tokens / 1e6, passed, f"C{number}", label=f"{arm} (n={len(curves)})")
        axis.set(title=name, xlabel="decoded tokens, millions", ylabel="held-out pass@1")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


FAMILY = replace(
    thrifty.FAMILY,
    work="shared",
    arms=tuple(thrifty.arms(METHODS, LENGTHS)),
    collect=collect,
    tables=tables,
    draw=draw,
    default=tuple(
        thrifty.name_of(arm, rate, task)
        for task, of_task in COMPOSITIONS.items()
        for arm, rate in ((thrifty.BASE, DAPO[task]), *of_task)
    ),
)
