"""ARRoL against GRPO, random pruning and DAPO, on short answers (Countdown) and on long ones (chain sums)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tables as t
from families.base import Arm, Family, Said, Start
from runs import Run, claims
from tables import SEEDS, Column, Figures, Summary

from winnow.base.intervals import mean_interval

STARTS = {
    "countdown": Start("countdown-arrol", {"max_steps": 270}, "warm-countdown"),
    "chain-sum": Start("chain-sum-arrol", {"max_steps": 900, "batch_size": 32}, "warm-chain-sum", shared=True),
}
"""By task. A model for chain sums takes minutes to make."""
NO_GATE, DAPO = "gates=[]", "filter=zero_variance"
CHANGES: dict[str, tuple[str, ...]] = {
    "grpo": (NO_GATE,),
    "random": ("gates=[{name: arrol, quality: logprob, strength: 0}]",),
    "arrol": (),
    "dapo": (NO_GATE, DAPO),
    "dapo-arrol": (DAPO,),
    "keep-25": ("gates=[{name: arrol, keep_rate: 0.25}]",),
    "keep-75": ("gates=[{name: arrol, keep_rate: 0.75}]",),
    "literal": ("gates=[{name: arrol, balance: literal}]",),
    "distinct": ("gates=[{name: arrol, balance: distinct}]",),
    "unbiased": ("gates=[{name: arrol, unbiased: true}]",),
    "logprob": ("gates=[{name: arrol, quality: logprob}]",),
}
"""Arm -> what it changes. `random` prunes as much, whatever the prediction; a keep rate of 1 is `grpo`."""
VOTES = ("majority", "deepconf-lowest", "logprob", "head")
"""Answers here are shorter than DeepConf's window, so its lowest, bottom and tail confidence are the same."""
COLD_STEPS = 20
LEVEL = 0.75
"""Part of the base's gain in pass@1 to which times are compared."""
GATE = "gate/arrol/"


def arms(task: str) -> list[Arm]:
    start = STARTS[task]
    return [
        Arm(f"{task}-{name}", start.recipe, changes, start, votes=VOTES if name == "arrol" else ())
        for name, changes in CHANGES.items()
    ]


# ---- figures of a run --------------------------------------------------------------------------------------------


def mean_after(run: Run, key: str, step: int) -> float | None:
    values = [row[key] for row in run.rows if row["step"] > step and key in row]
    return float(np.mean(values)) if values else None


def gate_figures(run: Run, after: int) -> dict[str, dict[str, float | None]]:
    """Means over the steps after that many: of what was trained, and of the gate."""
    columns = ("keep_rate", "success", "balance", "brier", "auroc", "accuracy")
    return {
        "trained": {key: mean_after(run, key, after) for key in ("reward", "frac_reward_zero_std")},
        "gate": {key: mean_after(run, GATE + key, after) for key in columns},
    }


def summary(run: Run, timed: bool) -> Summary:
    """Seconds are those of a median step."""
    seconds = {phase: float(np.median(run.series(f"seconds/{phase}"))) for phase in ("generate", "update")}
    return {
        "seed": run.seed,
        "deployed": run.deployed,
        "tokens": run.data.tokens,
        "seconds": seconds if timed else None,
        **gate_figures(run, after=COLD_STEPS),
        "curve": run.curve,
    }


def votes_of(work: Path, arm: str) -> list[dict[str, Any]]:
    found = []
    for _, claim in claims(work, arm):
        found.append(claim["votes"]["votes"] | {"pass@1": claim["votes"]["pass@1"], "seed": claim["seed"]})
    return found


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    """Seconds are kept of runs that ran when those of `grpo` did; others say nothing about speed."""
    whole = dict(said)
    for task in STARTS:
        names = {arm.name: arm.name.removeprefix(f"{task}-") for arm in arms(task)}
        timed = f"{task}-grpo" in runs
        new = {names[arm]: [summary(run, timed) for run in runs[arm]] for arm in names if arm in runs}
        kept = said.get(task, {"runs": {}, "votes": []})
        merged = t.merged(kept["runs"], new, list(names.values()))
        if "grpo" in merged:
            whole[task] = {"runs": merged, "votes": votes_of(work, f"{task}-arrol") or kept["votes"]}
    return whole


# ---- tables ------------------------------------------------------------------------------------------------------


def both(run: Summary) -> float:
    """Seconds of generation and update."""
    return float(run["seconds"]["generate"] + run["seconds"]["update"])


def seconds(phase: str) -> t.Value:
    return both if phase == "both" else lambda run: run["seconds"][phase]


def timed(runs: list[Summary], base: list[Summary]) -> bool:
    return all(run["seconds"] for run in (*base, *runs))


def times_faster(head: str, phase: str) -> Column:
    def cell(runs: list[Summary], base: list[Summary]) -> str:
        if not timed(runs, base):
            return ""
        return t.text(t.against(base, runs, seconds(phase), as_ratio=True), t.TWO)

    return Column(head, cell)


def to_level(runs: list[Summary], base: list[Summary]) -> str:
    """How many times sooner the mean curve has made `LEVEL` of the gain in held-out pass@1 that the base makes."""
    if not timed(runs, base):
        return ""
    _, target = rising_curve(base)
    level = target[0] + LEVEL * (target[-1] - target[0])
    reached = [crossing(*rising_curve(side), level) for side in (base, runs)]
    return "never" if reached[0] is None or reached[1] is None else f"{reached[0] / reached[1]:.2f}"


def rising_curve(runs: list[Summary]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of generation and update at each evaluation (a median step's times the steps), and held-out pass@1."""
    curve = t.mean_curve(runs)
    return curve[:, 0] * np.mean([both(run) for run in runs]), np.maximum.accumulate(curve[:, 3])


def crossing(axis: np.ndarray, values: np.ndarray, level: float) -> float | None:
    """Where the rising curve first is at `level`, by linear interpolation."""
    if values[-1] < level:
        return None
    i = int(np.argmax(values >= level))
    if i == 0:
        return float(axis[0])
    part = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(axis[i - 1] + part * (axis[i] - axis[i - 1]))


COLUMNS = (
    SEEDS,
    t.mean("final pass@1", "deployed.pass@1"),
    t.difference("difference", "deployed.pass@1", own=True),
    t.mean("greedy", "deployed.greedy"),
    t.ratio("tokens", "tokens"),
    times_faster("generation, times faster", "generate"),
    times_faster("update", "update"),
    times_faster("both", "both"),
    Column(f"time to {LEVEL:.0%} of the base's gain, times shorter", to_level),
)


def or_blank(head: str, value: t.Value) -> Column:
    def cell(runs: list[Summary], base: list[Summary]) -> str:
        found = t.over_seeds(runs, value)
        return "" if found is None else t.text(found)

    return Column(head, cell)


GATE_COLUMNS = (
    or_blank("right, of those trained", "trained.reward"),
    or_blank("groups without signal", "trained.frac_reward_zero_std"),
    or_blank("keep rate", "gate.keep_rate"),
    or_blank("right, of all", "gate.success"),
    or_blank("p (1 - p)", "gate.balance"),
    or_blank("Brier", "gate.brier"),
    or_blank("AUROC", "gate.auroc"),
    or_blank("accuracy", "gate.accuracy"),
)
"""After the cold start; shares are means over steps."""


def base_of(arm: str) -> str:
    return "dapo" if arm.startswith("dapo") else "grpo"


def vote_table(votes: Sequence[dict[str, Any]]) -> str:
    rows = []
    for name in (key for key in (votes[0] if votes else {}) if key not in ("pass@1", "seed")):
        won = mean_interval([v[name]["share"] for v in votes])
        gain = mean_interval([v[name]["share"] - v["majority"]["share"] for v in votes])
        rows.append([name, t.percent(won), "" if name == "majority" else t.text(gain, "{:+.1f}", 100)])
    return t.markdown(["weights", "maj@32", "points over majority"], rows)


def tables(said: Said) -> dict[str, str]:
    found: dict[str, str] = {}
    for task in (task for task in STARTS if task in said):
        runs: Figures = said[task]["runs"]
        found[f"arrol-{task}"] = t.table_of(runs, COLUMNS, base=base_of)
        found[f"arrol-{task}-gate"] = t.table_of(runs, GATE_COLUMNS)
        found[f"arrol-{task}-votes"] = vote_table(said[task]["votes"])
    return found


FAMILY = Family("arrol-claims", tuple(arm for task in STARTS for arm in arms(task)), collect, tables)
