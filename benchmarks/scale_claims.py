"""Countdown with every method on: in one process, and over Ray, vLLM and FSDP2 on a cluster of three nodes.

The nodes are on this machine: two samplers with vLLM, two ranks of the learner. Each run is a process of its own and
leaves `claim.json`; what is there is not done again, and a run that was cut off is resumed. Needs `make install-scale`:

    .venv-scale/bin/python benchmarks/scale_claims.py --jobs 1
    .venv/bin/python benchmarks/scale_claims.py --out benchmarks/results/scale_claims.json --docs docs/scale.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from arms import Arm, fill, read_options, run_all, table, train, write_json
from claims import DEPLOYMENT, warm_model

from winnow.base.processor import processor

EVERYTHING = (
    "prompts_per_step=16",
    "num_generations=8",
    "gates=[{name: arrol, keep_rate: 0.6, cold_start: 10}]",
    "audit={epsilon: 0.1}",
    "advantage=opob",
    "step_scale=ess",
    "correction={name: truncate, level: sequence, high: 8}",
    "learning_rate=3.0e-4",
    "max_steps=100",
    "max_lag=2",
)
"""On top of GRESO, the filter and Adaptive-K of the recipe: ARRoL with its head, audits, VCPO."""
CLUSTER = (
    "engine=vllm",
    "sync={name: ray, samplers: 2}",
    "learner={name: fsdp, ranks: 2}",
)
ARMS = {
    "one-process": Arm("one-process", "countdown-all", EVERYTHING),
    "cluster": Arm("cluster", "countdown-all", (*EVERYTHING, *CLUSTER)),
}


@contextmanager
def three_nodes() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=2)
        ray.init(address=nodes.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def train_arm(arm: Arm, seed: int, work: Path) -> None:
    """One run, its account, and its evaluation on all held-out puzzles at deployment sampling."""
    from winnow.record.ledger import Ledger
    from winnow.run.standalone import evaluate_model

    with three_nodes() if arm.name == "cluster" else nullcontext():
        run = train(arm, seed, work, ["save_steps=20"])
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {
        "arm": arm.name,
        "seed": seed,
        "deployed": evaluate_model(str(run), DEPLOYMENT),
        "problems": proof.problems,
        "lag": max((row.get("lag/max", 0.0) for row in rows), default=0.0),
        "rollouts": sum(row.get("rollouts/sampled", 0.0) for row in rows),
        "cpu": processor(),
    }
    write_json(run / "claim.json", found)


def main() -> None:
    options = read_options(argparse.ArgumentParser(description=__doc__.splitlines()[0]), list(ARMS), "scale", jobs=1)
    if options.one:
        name, seed = options.one
        if name == "warm":
            warm_model(seed, options.work)
        else:
            train_arm(ARMS[name], seed, options.work)
        return
    ok = run_all(__file__, [["warm"], options.arms], options.seeds, options.work, options.jobs)
    paths = sorted(path for arm in ["warm", *ARMS] for path in options.work.glob(f"{arm}-s*/claim.json"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for run in runs:
        run["deployed"].pop("model", None)  # a path
    if options.out:
        write_json(options.out, runs)
    if options.docs:
        fill(options.docs, {"countdown": accuracies(runs)})
    sys.exit(0 if ok else 1)


def accuracies(runs: list[dict[str, Any]]) -> str:
    from claims_figures import interval  # SciPy: the tables can be made in another environment

    lines = []
    for arm in ("warm start", *ARMS):
        there = [run for run in runs if run["arm"] == arm]
        passed = {run["seed"]: run["deployed"]["pass@1"] for run in there}
        found = interval(list(passed.values()))
        if found is None:
            continue
        spread = "" if found.low is None else f"{found.low:.3f} to {found.high:.3f}"
        by_seed = ", ".join(f"{passed[seed]:.3f}" for seed in sorted(passed))
        lag = max((run.get("lag", 0.0) for run in there), default=0.0)
        lines.append([arm, by_seed, f"{found.mean:.3f}", spread, f"{lag:g}"])
    return table(["run", "held-out pass@1, by seed", "mean", "95% interval", "largest lag"], lines)


if __name__ == "__main__":
    main()
