"""Stopping rollouts early: the mid-trajectory gate in small ALFWorld rooms, and ARRoL on short and on long answers.

The gates of the rooms are those that `winnow gate` chose on 256 groups of the starting model with a precision
of 0.8. ARRoL's short answers are Countdown's, its long ones chain sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tables as t
from families.base import Arm, Family, Start
from runs import Run, metrics_of, summary
from tables import SEEDS, Figures, Summary

from winnow.methods.intervals import mean_interval

ROOMS = Start(
    "alfworld",
    {"max_steps": 250, "batch_size": 48, "learning_rate": 2e-3, "num_layers": 2, "max_positions": 1024},
    shared=True,
)
"""As in the paper, all seeds start from the same model."""
BY_DISTANCE = "gates=[{name: divergence, signal: prefix_edit_distance, k: 4, threshold: 0.12}]"
BY_PROGRESS = "gates=[{name: divergence, k: 8, threshold: 0.0, progress: 0.5}]"
RANDOM = "gates=[{name: random, k: 8, share: 0.393}]"
"""Cuts as many groups as that by progress, at the same step."""
WITHOUT_ZERO = "filter={name: zero_variance, refill: false}"
CUT: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "gate": (BY_DISTANCE,),
    "gate-progress": (BY_PROGRESS,),
    "dapo": (WITHOUT_ZERO,),
    "random-cut": (RANDOM,),
    "gate-dapo": (BY_DISTANCE, WITHOUT_ZERO),
}
"""Arms of the rooms."""
STARTS = {
    "countdown": Start("countdown-arrol", {"max_steps": 270}, "warm-countdown"),
    "chain-sum": Start("chain-sum-arrol", {"max_steps": 900, "batch_size": 32}, "warm-chain-sum", shared=True),
}
"""By task. A model for chain sums takes minutes to make."""
NO_GATE, DAPO = "gates=[]", "filter=zero_variance"
PRUNED: dict[str, tuple[str, ...]] = {
    "grpo": (NO_GATE,),
    "random": ("gates=[{name: arrol, strength: 0}]",),
    "arrol": (),
    "dapo": (NO_GATE, DAPO),
    "dapo-arrol": (DAPO,),
    "keep-25": ("gates=[{name: arrol, keep_rate: 0.25}]",),
    "keep-75": ("gates=[{name: arrol, keep_rate: 0.75}]",),
    "distinct": ("gates=[{name: arrol, balance: distinct}]",),
}
"""Arms of both tasks. `random` prunes as much, whatever the prediction; a keep rate of 1 is `grpo`."""
VOTES = ("majority", "head")
COLD_STEPS = 20
OF_GATE = ("keep_rate", "success", "balance", "brier", "auroc")


def stopped(run: Run) -> float:
    """Share of the groups that were cut, or of the rollouts that were pruned, of those rolled out."""
    cut = 0.0
    for row in run.rows:
        for key in row:
            if key.endswith("/cut_share"):
                cut += row[key] * row[key.replace("cut_share", "asked")]
    kept = run.series("gate/arrol/keep_rate", COLD_STEPS)
    return 1 - float(np.mean(kept)) if kept else cut / sum(run.series("groups/rolled_out"))


def of_run(run: Run, after: int | None = None) -> Summary:
    """Gate figures are means over the steps after so many; by default those after the cold start of ARRoL's arms."""
    if after is None:
        after = 0 if run.claim["arm"] in CUT else COLD_STEPS
    keys = ("grad_norm", "reward", "frac_reward_zero_std", *(f"gate/arrol/{key}" for key in OF_GATE))
    middles = {phase: float(np.median(run.series(f"seconds/{phase}"))) for phase in ("generate", "update")}
    return summary(run) | metrics_of(run, keys, after) | {"stopped": stopped(run), "median_seconds": middles}


def step_seconds(run: Summary) -> float | None:
    """Of generation and update, in a median step; None of runs that did not run when their base did."""
    seconds = run.get("median_seconds", run.get("seconds"))
    return float(sum(seconds.values())) if isinstance(seconds, dict) else None


PASSED = (
    SEEDS,
    t.mean("final pass@1", "deployed.pass@1"),
    t.difference("difference", "deployed.pass@1"),
    t.mean("greedy", "deployed.greedy"),
    t.ratio("tokens", "tokens"),
)
CUT_COLUMNS = (
    *PASSED,
    t.share("groups cut", "stopped"),
    t.ratio("gradient norm", "grad_norm", own=False),
)
PRUNED_COLUMNS = (*PASSED, t.ratio("seconds of a median step", step_seconds))
GATE_COLUMNS = (
    t.mean("right, of those trained", "reward"),
    t.mean("groups without signal", "frac_reward_zero_std"),
    *(
        t.mean(head, f"gate/arrol/{key}")
        for head, key in zip(("keep rate", "right, of all", "p (1 - p)", "Brier", "AUROC"), OF_GATE, strict=True)
    ),
)
"""After the cold start; shares are means over steps."""


def vote_table(runs: Sequence[Summary]) -> str:
    votes = [run["votes"] for run in runs if "votes" in run]
    rows = []
    for name in (key for key in (votes[0] if votes else {}) if key not in ("pass@1", "seed")):
        won = mean_interval([v[name]["share"] for v in votes])
        gain = mean_interval([v[name]["share"] - v["majority"]["share"] for v in votes])
        rows.append([name, t.percent(won), "" if name == "majority" else t.text(gain, "{:+.1f}", 100)])
    return t.markdown(["weights", "maj@32", "points over majority"], rows)


def cut_tables(runs: Figures) -> dict[str, str]:
    return {"gate-tier-3": t.table_of(runs, CUT_COLUMNS, base="grpo")}


def pruned_tables(runs: Figures) -> dict[str, str]:
    made = {}
    for task in STARTS:
        arms = [arm for arm in runs if arm.startswith(f"{task}-")]

        def base_of(arm: str, task: str = task) -> str:
            return f"{task}-dapo" if arm.startswith(f"{task}-dapo") else f"{task}-grpo"

        made[f"arrol-{task}"] = t.table_of(runs, PRUNED_COLUMNS, arms, base_of)
        made[f"arrol-{task}-gate"] = t.table_of(runs, GATE_COLUMNS, arms)
        made[f"arrol-{task}-votes"] = vote_table(runs.get(f"{task}-arrol", []))
    return made


def arms() -> list[Arm]:
    rooms = [Arm(name, ROOMS.recipe, changes, ROOMS) for name, changes in CUT.items()]
    for task, start in STARTS.items():
        for name, changes in PRUNED.items():
            votes = VOTES if name == "arrol" else ()
            rooms.append(Arm(f"{task}-{name}", start.recipe, changes, start, votes=votes))
    return rooms


FAMILY = Family(
    work="stopping",
    arms=tuple(arms()),
    tables={"gate_claims.json": cut_tables, "arrol_claims.json": pruned_tables},
    of_run=of_run,
)
