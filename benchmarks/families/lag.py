"""Stale samples: how much lag each method tolerates, and what samplers in other processes change.

`lag*`: the recipe `countdown-lag` at a lag of twelve, truncation at every lag, VCPO and its parts, mixed lags.
`clock-*`: asynchronous against synchronous training by the clock; nothing else should run.
`gate-*`: gates whose rules a sampler process evaluates.
`one-process`, `cluster`: every method on, the latter over Ray, vLLM and FSDP2 on three nodes of this machine (needs
`make install-scale` and its interpreter).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import tables as t
from families import selection, stopping
from families.base import Arm, Family, Start
from runs import Run, metrics_of
from tables import SEEDS, Column, Figures, Summary

from winnow.record.ledger import Ledger
from winnow.record.records import LEDGER

RECIPE = "countdown-lag"
LAG = 12
"""At which every variant runs."""
VARIANTS = (
    *("tis8", "otb", "ess-only", "vcpo", "plain", "tis2", "tis-token", "mis", "deepseek", "m2po", "gspo"),
    *("opo", "opob-only", "low-lr", "kl"),
)
MIXED = ("tis8", "m2po", "vcpo")
"""Variants that also run with rollouts of different lags, 0 to `LAG`, which VCPO (E.2) says is harder for M2PO."""
SWEEP, LAGS = "tis8", (2, 4, 8, 16)
"""Further lags of a variant."""
START = Start(RECIPE, {"max_steps": 270})
SYNC = "lag0-tis8"
EVAL_STEPS, WORKED_AHEAD = 25, 6
"""Of runs by the clock: evaluations, and the steps after each, for which samplers have worked ahead meanwhile."""
CLOCK = ("learning_rate=1e-4", "max_steps=150", f"eval_steps={EVAL_STEPS}")
CLOCKED = {
    "clock-sync": ("max_lag=0", "threads=1"),
    "clock-sync-2-threads": ("max_lag=0", "threads=2"),
    **{f"clock-async-{lag}": (f"max_lag={lag}", "threads=1", "sync=processes") for lag in (1, 2, 4)},
}
CHAIN_SUM = stopping.STARTS["chain-sum"]
GATES = {
    "gate-alfworld": (stopping.ROOMS, stopping.BY_DISTANCE, 20),
    "gate-chain-sum": (CHAIN_SUM, "gates=[{name: arrol, cold_start: 10}]", 40),
}
"""Task -> how its model is made, gate, steps; with a lag of at most one step."""
SYNCS = {"in-process": "in_process", "processes": "{name: processes, samplers: 1}"}
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
MEDIANS = ("ess_ratio/with_gradient", "sampling/kl", "grad_norm", "effective_learning_rate")
MEANS = ("lag/mean", "idle/learner", "idle/sampler")


def lagged(variant: str, lag: int, *, mixed: bool = False) -> Arm:
    overrides = (f"variant={variant}", f"max_lag={lag}")
    if mixed:
        overrides = (*overrides, "sync={name: in_process, lag: mixed}")
    return Arm(f"lag{lag}-{variant}{'-mixed' if mixed else ''}", RECIPE, overrides, START)


def arms() -> Iterator[Arm]:
    yield lagged("tis8", 0)
    yield from (lagged(variant, LAG) for variant in VARIANTS)
    yield from (lagged(variant, LAG, mixed=True) for variant in MIXED)
    yield from (lagged(SWEEP, lag) for lag in LAGS)
    yield from (Arm(name, RECIPE, (*CLOCK, *changes), START) for name, changes in CLOCKED.items())
    for task, (start, gate, steps) in GATES.items():
        for sync, spec in SYNCS.items():
            changes = (gate, f"sync={spec}", "max_lag=1", "eval_steps=null", f"max_steps={steps}")
            model = Start(start.recipe, start.settings, f"warm-{task}", shared=True)
            yield Arm(f"{task}-{sync}", start.recipe, changes, model)
    everything = Start(selection.START.recipe, selection.START.settings, "warm-everything")
    yield Arm("one-process", "countdown-all", EVERYTHING, everything)
    yield Arm("cluster", "countdown-all", (*EVERYTHING, *CLUSTER), everything)


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


def of_run(run: Run) -> Summary:
    """Collapsed: ended with less than half of the held-out pass@1 that it started with."""
    evaluated = bool(run.series("eval/pass@1"))
    passed = [point.passed for point in run.data.curve] if evaluated else []
    final = run.deployed["pass@1"]
    timed = [row for row in run.rows if (row["step"] - 1) % EVAL_STEPS >= WORKED_AHEAD]
    phases = ("seconds/generate", "seconds/update", "seconds/publish")
    with Ledger.open(run.path / LEDGER, read_only=True) as ledger:
        problems = ledger.verify().problems
    return {
        "seed": run.seed,
        "pass@1": final,
        "collapsed": bool(passed) and final < passed[0] / 2,
        "greedy": run.deployed.get("greedy"),
        "tokens": run.rows[-1]["num_tokens"],
        "stopped": stopping.stopped(run),
        "seconds a step": float(np.mean([sum(row.get(phase, 0.0) for phase in phases) for row in timed])),
        "lag": max(run.series("lag/max"), default=0.0),
        "problems": problems,
        **metrics_of(run, MEDIANS, middle=np.median),
        **metrics_of(run, MEANS),
    }


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
CLOCK_COLUMNS = (
    SEEDS,
    t.ratio("seconds a step", "seconds a step"),
    t.mean("final pass@1", "pass@1"),
    t.mean("mean lag", "lag/mean", "{:.1f}"),
    t.share("learner idle", "idle/learner"),
    t.share("sampler idle", "idle/sampler"),
)
GATE_COLUMNS = (
    SEEDS,
    t.mean("final pass@1", "pass@1"),
    t.difference("difference", "pass@1"),
    t.mean("greedy", "greedy"),
    t.mean("stopped by the gate", "stopped", t.TWO),
    t.ratio("tokens", "tokens", own=False),
)
CLUSTER_COLUMNS = (SEEDS, t.mean("held-out pass@1", "pass@1"))


def lag_tables(name: str, runs: Figures) -> dict[str, str]:
    found = {name: t.table_of(runs, COLUMNS, [arm for arm in runs if arm.startswith("lag")], SYNC, head="variant")}
    if clocked := [arm for arm in runs if arm.startswith("clock-")]:
        found["clock"] = t.table_of(runs, CLOCK_COLUMNS, clocked, "clock-sync")
    return found


def gate_tables(runs: Figures) -> dict[str, str]:
    return {"sync-gates": t.table_of(runs, GATE_COLUMNS, base=lambda arm: arm.replace("processes", "in-process"))}


def cluster_tables(runs: Figures) -> dict[str, str]:
    return {"cluster": t.table_of(runs, CLUSTER_COLUMNS, head="run")}


FAMILY = Family(
    work="lag",
    arms=tuple(arms()),
    tables={
        "vcpo_claims.json": lambda runs: lag_tables("vcpo", runs),
        "async_claims.json": lambda runs: lag_tables("async", runs),
        "sync_claims.json": gate_tables,
        "scale_claims.json": cluster_tables,
    },
    of_run=of_run,
    default=tuple(arm.name for arm in arms() if arm.name.startswith("lag")),
    may_stop=True,
    around=around,
)
