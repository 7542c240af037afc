"""Gates beside samplers in other processes against gates in one process: do runs end alike? Every arm for every seed.

The gate of small ALFWorld rooms and ARRoL with its head on chain sums, both with a lag of at
most one step. What is finished is not done again, and a run that was cut off is resumed.

    python benchmarks/sync_claims.py --out benchmarks/results/sync_claims.json --docs docs/claims.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import arrol_claims
import gate_claims
import summaries as sm
from arms import Arm, fill, read_options, run_all, table, train, write_json
from claims_tables import text

from winnow.record.records import METRICS
from winnow.study.report_data import read_lines

TASKS = {"alfworld": "alfworld", "chain-sum": "chain-sum-arrol"}
"""Task -> recipe."""
GATES = {
    "alfworld": "gates=[{name: divergence, k: 4, threshold: 0.12}]",
    "chain-sum": "gates=[{name: arrol, cold_start: 10}]",
}
STEPS = {"alfworld": 20, "chain-sum": 40}
SYNCS = {"in-process": "in_process", "processes": "{name: processes, samplers: 1}"}
FINAL = {"eval_generations": 8, "eval_greedy": True}
ARMS = {
    f"{task}-{sync}": Arm(
        f"{task}-{sync}",
        recipe,
        (GATES[task], f"sync={spec}", "max_lag=1", "eval_steps=null", f"max_steps={STEPS[task]}"),
    )
    for task, recipe in TASKS.items()
    for sync, spec in SYNCS.items()
}


def _task(arm: str) -> str:
    return next(task for task in TASKS if arm.startswith(task))


def warm_model(name: str, work: Path) -> None:
    """One model for all seeds."""
    (work / name).mkdir(exist_ok=True)
    if name == "warm-alfworld":
        gate_claims.warm_model(0, work / name)
    else:
        arrol_claims.warm_model("chain-sum", 0, work / name)
    done = work / f"{name}-s0"
    done.mkdir(exist_ok=True)
    write_json(done / "claim.json", {"arm": name, "seed": 0})


def train_arm(arm: Arm, seed: int, work: Path) -> None:
    from winnow.run.standalone import evaluate_model

    model = next((work / f"warm-{_task(arm.name)}").glob("warm-*s0"))
    run = train(arm, seed, work, [f"model={model}"])
    said = {"arm": arm.name, "seed": seed}
    write_json(run / "claim.json", said | {"deployed": evaluate_model(str(run), FINAL)})


def write_figures(work: Path, out: Path | None, docs: Path | None) -> None:
    """What is there so far."""
    figures = {arm: found for arm in ARMS if (found := _read(work, arm))}
    rows = []
    for arm, found in figures.items():
        base = figures.get(f"{_task(arm)}-in-process", [])
        same = arm.endswith("in-process")
        rows.append(
            [
                arm,
                str(len(found)),
                text(sm.over_seeds(found, lambda r: r["pass@1"])),
                "" if same else text(sm.difference(found, base, lambda r: r["pass@1"]), "{:+.3f}"),
                text(sm.over_seeds(found, lambda r: r["greedy"])),
                text(sm.over_seeds(found, lambda r: r["stopped"]), "{:.2f}"),
                "" if same else text(sm.ratio(found, base, lambda r: r["tokens"]), "{:.2f}"),
            ]
        )
    if out is not None:
        out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if docs is not None:
        head = ["arm", "seeds", "final pass@1", "difference", "greedy", "stopped by the gate", "tokens"]
        fill(docs, {"sync-gates": table(head, rows)})


def _read(work: Path, arm: str) -> list[dict[str, Any]]:
    """Figures of every finished run of an arm."""
    found = []
    for claim in sorted(work.glob(f"{arm}-s[0-9]*/claim.json")):
        said = json.loads(claim.read_text(encoding="utf-8"))
        rows = list(read_lines(claim.parent / METRICS, []))
        found.append(
            {
                "seed": said["seed"],
                "pass@1": said["deployed"]["pass@1"],
                "greedy": said["deployed"]["greedy"],
                "tokens": rows[-1]["num_tokens"],
                "stopped": stopped(rows),
            }
        )
    return found


def stopped(rows: list[dict[str, Any]]) -> float:
    """Share of the groups that were cut, or of the rollouts that were pruned, over the second half of the run."""
    late = rows[len(rows) // 2 :]
    found = [row.get("gate/divergence/cut_share", 1 - row.get("gate/arrol/keep_rate", 1.0)) for row in late]
    return float(sum(found) / len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = read_options(parser, list(ARMS), "sync-claims", jobs=1, seeds=3)  # those of processes take two cores
    if options.one:
        name, seed = options.one
        if name.startswith("warm-"):
            warm_model(name, options.work)
        else:
            train_arm(ARMS[name], seed, options.work)
        return
    warm = sorted({f"warm-{_task(arm)}" for arm in options.arms})
    ok = run_all(__file__, [warm], [0], options.work, 1)
    ok = ok and run_all(__file__, [options.arms], options.seeds, options.work, options.jobs)
    if options.out or options.docs:
        write_figures(options.work, options.out, options.docs)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
