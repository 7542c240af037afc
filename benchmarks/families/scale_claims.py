"""Countdown with every method on: in one process, and over Ray, vLLM and FSDP2 on a cluster of three nodes.

The nodes are on this machine: two samplers with vLLM, two ranks of the learner. The arm `cluster` needs
`make install-scale` and its interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import tables as t
from families.base import Arm, Family, Said
from families.selection_claims import DEPLOYMENT, START
from runs import Run, claims

from winnow.base.intervals import mean_interval
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
CLUSTER = ("engine=vllm", "sync={name: ray, samplers: 2}", "learner={name: fsdp, ranks: 2}")
ARMS = (
    Arm("one-process", "countdown-all", EVERYTHING, START),
    Arm("cluster", "countdown-all", (*EVERYTHING, *CLUSTER), START),
)


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


def around(arm: Arm) -> AbstractContextManager[None]:
    return three_nodes() if arm.name == "cluster" else nullcontext()


def account(run: Path) -> dict[str, Any]:
    from winnow.record.ledger import Ledger

    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        proof = ledger.verify()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "problems": proof.problems,
        "lag": max((row.get("lag/max", 0.0) for row in rows), default=0.0),
        "rollouts": sum(row.get("rollouts/sampled", 0.0) for row in rows),
        "cpu": processor(),
    }


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Any:
    """A list of what each run left; those of earlier calls stay."""
    found = {(run["arm"], run["seed"]): run for run in said}
    for name in (START.name, *(arm.name for arm in ARMS)):
        for _, claim in claims(work, name):
            claim["deployed"].pop("model", None)  # a path
            found[claim["arm"], claim["seed"]] = claim
    return list(found.values())


def tables(said: Any) -> dict[str, str]:
    rows = []
    for arm in ("warm start", *(arm.name for arm in ARMS)):
        runs = sorted((run for run in said if run["arm"] == arm), key=lambda run: run["seed"])
        if not runs:
            continue
        passed = [run["deployed"]["pass@1"] for run in runs]
        found = mean_interval(passed)
        between = "" if found.low is None else f"{found.low:.3f} to {found.high:.3f}"
        lag = max(run.get("lag", 0.0) for run in runs)
        rows.append([arm, ", ".join(f"{p:.3f}" for p in passed), f"{found.mean:.3f}", between, f"{lag:g}"])
    return {"countdown": t.markdown(["run", "held-out pass@1, by seed", "mean", "95% interval", "largest lag"], rows)}


FAMILY = Family("scale", ARMS, collect, tables, final=DEPLOYMENT, jobs=1, around=around, more=account)
