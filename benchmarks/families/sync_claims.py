"""Do runs with gates end alike when samplers are processes of their own? Each task with a lag of at most one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tables as t
from families import arrol_claims, gate_claims
from families.base import Arm, Family, Said, Start
from runs import Run
from tables import SEEDS, Figures, Summary

TASKS = {
    "alfworld": ("warm-alfworld", gate_claims.START, "gates=[{name: divergence, k: 4, threshold: 0.12}]", 20),
    "chain-sum": ("warm-chain-sum", arrol_claims.STARTS["chain-sum"], "gates=[{name: arrol, cold_start: 10}]", 40),
}
"""Task -> name of the model that all its runs start from, how it is made, gate, steps."""
SYNCS = {"in-process": "in_process", "processes": "{name: processes, samplers: 1}"}


def arms() -> list[Arm]:
    found = []
    for task, (name, like, gate, steps) in TASKS.items():
        start = Start(like.recipe, like.settings, name, shared=True)
        for sync, spec in SYNCS.items():
            changes = (gate, f"sync={spec}", "max_lag=1", "eval_steps=null", f"max_steps={steps}")
            found.append(Arm(f"{task}-{sync}", like.recipe, changes, start))
    return found


def stopped(rows: list[dict[str, Any]]) -> float:
    """Share of the groups that were cut, or of the rollouts that were pruned, over the second half of the run."""
    late = rows[len(rows) // 2 :]
    shares = [row.get("gate/divergence/cut_share", 1 - row.get("gate/arrol/keep_rate", 1.0)) for row in late]
    return float(sum(shares) / len(shares))


def summary(run: Run) -> Summary:
    return {
        "seed": run.seed,
        "pass@1": run.deployed["pass@1"],
        "greedy": run.deployed["greedy"],
        "tokens": run.rows[-1]["num_tokens"],
        "stopped": stopped(run.rows),
    }


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    new = {arm: [summary(run) for run in found] for arm, found in runs.items()}
    return t.merged(said, new, [arm.name for arm in FAMILY.arms])


COLUMNS = (
    SEEDS,
    t.mean("final pass@1", "pass@1"),
    t.difference("difference", "pass@1"),
    t.mean("greedy", "greedy"),
    t.mean("stopped by the gate", "stopped", t.TWO),
    t.ratio("tokens", "tokens", own=False),
)


def base_of(arm: str) -> str:
    return next(f"{task}-in-process" for task in TASKS if arm.startswith(task))


def tables(said: Said) -> dict[str, str]:
    runs: Figures = said
    return {"sync-gates": t.table_of(runs, COLUMNS, base=base_of)}


FAMILY = Family("sync-claims", tuple(arms()), collect, tables, seeds=3, jobs=1)
