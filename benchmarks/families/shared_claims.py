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

COMPOSITIONS: dict[str, tuple[tuple[str, float], ...]] = {
    "chain": (("thrifty-shared-twice-linear", 1),),
    "smollm2": (("thrifty-shared-twice", 1),),
    "countdown": (("mopps-shared", 2), ("thrifty-shared-linear", 2)),
    "alfworld": (("thrifty-shared-twice", 0.5),),
}
"""Task -> compositions and their rates."""
DAPO = {"chain": 1, "smollm2": 2, "countdown": 2, "alfworld": 2}
"""The base's best rate."""


def tables(said: Said) -> dict[str, str]:
    runs = said["runs"]
    arms = list(dict.fromkeys(arm for of_task in COMPOSITIONS.values() for arm, _ in of_task))
    twins = list(thrifty.TWINS.values())
    peers = (*thrifty.PEERS[:-1], "greso", *(arm for arm, _ in COMPOSITIONS["countdown"]))
    made = {
        "shared": thrifty.against(runs, arms, (*thrifty.BASES, *twins), list(COMPOSITIONS), smooth=False),
        "shared-peers": thrifty.against(runs, peers, twins, ["countdown"], smooth=False),
    }
    for name in COMPOSITIONS:
        task = thrifty.Task(name, runs, smooth=False)
        found = {
            thrifty.name_of(arm, rate, name): task.of(arm, rate) for arm in thrifty.METHODS for rate in thrifty.RATES
        }
        for table, tuning in ((f"shared-{name}", False), (f"shared-rates-{name}", True)):
            rows = {arm: [run for run in of if (run["seed"] in thrifty.TUNING) is tuning] for arm, of in found.items()}
            if rows := {arm: of for arm, of in rows.items() if of}:
                made[table] = t.table_of(rows, task.columns()[: -len(task.to_levels())])
    return made


def draw(said: Said, path: Path) -> None:
    """Held-out pass@1 against decoded tokens: means over the seeds that count."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for name, axis in zip(COMPOSITIONS, axes.flat, strict=True):
        task = thrifty.Task(name, said["runs"], smooth=False)
        bases = [(arm, DAPO[name]) for arm in (thrifty.BASE, thrifty.TWINS[thrifty.BASE])]
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
    tables=tables,
    draw=draw,
    default=tuple(
        thrifty.name_of(arm, rate, task)
        for task, of_task in COMPOSITIONS.items()
        for arm, rate in ((thrifty.BASE, DAPO[task]), *of_task)
    ),
)
