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

BEST = {
    "countdown": ("thrifty-shared-linear", 2),
    "chain": ("thrifty-shared-twice-linear", 1),
    "alfworld": ("thrifty-shared-twice", 0.5),
    "smollm2": ("thrifty-shared-twice", 1),
}
"""Task -> the composition that is reported, and its rate."""
BASES = (*thrifty.BASES, *thrifty.TWINS.values())
DAPO = {"countdown": 2, "chain": 1, "alfworld": 2, "smollm2": 2}
"""The base's best rate."""


def tables(said: Said) -> dict[str, str]:
    runs = said["runs"]
    made = {
        "shared": thrifty.against(
            runs, list(dict.fromkeys(arm for arm, _ in BEST.values())), BASES, list(BEST), smooth=False
        )
    }
    made["shared-peers"] = thrifty.against(
        runs,
        (*thrifty.PEERS, "greso", "thrifty-shared-linear"),
        list(thrifty.TWINS.values()),
        ["countdown"],
        smooth=False,
    )
    for name in BEST:
        task = thrifty.Task(name, runs, smooth=False)
        found = {
            thrifty.name_of(arm, rate, name): task.of(arm, rate) for arm in thrifty.METHODS for rate in thrifty.RATES
        }
        for table, tuning in ((f"shared-{name}", False), (f"shared-rates-{name}", True)):
            rows = {arm: [run for run in of if (run["seed"] == thrifty.TUNING) is tuning] for arm, of in found.items()}
            if rows := {arm: of for arm, of in rows.items() if of}:
                made[table] = t.table_of(rows, task.columns()[: -len(task.to_levels())])
    return made


def draw(said: Said, path: Path) -> None:
    """Held-out pass@1 against decoded tokens: means over the seeds that count."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for name, axis in zip(BEST, axes.flat, strict=True):
        task = thrifty.Task(name, said["runs"], smooth=False)
        drawn = [(thrifty.BASE, DAPO[name]), (thrifty.TWINS[thrifty.BASE], DAPO[name]), BEST[name]]
        for number, (arm, rate) in enumerate(drawn):
            if curves := [run["curve"] for run in task.of(arm, rate) if run["seed"] != thrifty.TUNING]:
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
        thrifty.name_of(arm, rate, task) for task in BEST for arm, rate in (BEST[task], (thrifty.BASE, DAPO[task]))
    ),
)
