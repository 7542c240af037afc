"""The papers' methods with a pretrained model of 135M parameters on arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import tables as t
from families.arrol_claims import GATE_COLUMNS, gate_figures, vote_table, votes_of
from families.base import Arm, Family, Said
from harness import machine
from runs import Run
from tables import SEEDS, Column, Figures, Summary

RECIPE = "arithmetic-smollm2"
QUESTIONS = 96
"""Of the training set: with 16 of them a step three epochs, as GRESO knows a prompt only from an epoch before."""
COMMON = (
    "model=smollm2-135m",
    "threads=1",
    "max_steps=18",
    "eval_steps=6",
    "eval_prompts=128",
    "eval_generations=2",
    "eval_greedy=false",
    "save_steps=9",
)
VOTES = ("majority", "logprob", "head")
COLD_STEPS = 6
SHARE = 0.95
"""Of what GRPO ends with on a seed: the level to which costs are compared."""
PREFIX = "arithmetic-"

GRPO = ("advantage=grpo", "filter=keep_all", "policy_loss=clip", "loss_type=grpo", "correction=none")
DAPO = ("advantage=grpo", "policy_loss=clip", "loss_type=dapo", "epsilon_high=0.28", "correction=none")
REFILL = "filter=zero_variance"
FIXED = "rollout_batch={name: fixed, surplus: discard}"
GRESO = ("selector=greso", "rollout_batch=adaptive", "max_lag=1")
SIZE = "group_size={name: adaptive_k, tau: 0.5, window: 5}"
GATE = f"gates=[{{name: arrol, cold_start: {COLD_STEPS}}}]"
SIXTEEN = ("num_generations=16", "prompts_per_step=8")
TRUNCATED = "correction={name: truncate, level: sequence, high: 8}"
VCPO = ("advantage=opob", "step_scale=ess")
CHANGES: dict[str, tuple[str, ...]] = {
    "grpo": GRPO,
    "lag8": ("max_lag=8", TRUNCATED),
    "dapo": (*DAPO, REFILL, FIXED),
    "greso": (*DAPO, REFILL, *GRESO),
    "rloo": (),
    "active-adaptive-k": ("num_generations=4", "prompts_per_step=32", SIZE),
    "grpo-16": (*GRPO, *SIXTEEN),
    "arrol": (*GRPO, *SIXTEEN, GATE),
    "lag8-vcpo": ("max_lag=8", TRUNCATED, *VCPO),
    "all": (REFILL, SIZE, *GRESO, TRUNCATED, *VCPO, GATE),
}
"""`rloo` is the recipe itself. All have 128 rollouts a step, but for those that size or refill it themselves.
Runs with a lag of 8 hold nine copies of the weights (5 GB), so they are far apart in this list."""
ARMS = tuple(
    Arm(PREFIX + name, RECIPE, changes, votes=VOTES if name == "arrol" else ()) for name, changes in CHANGES.items()
)
PRUNED = ("grpo-16", "arrol", "all")


def prepare(work: Path) -> list[str]:
    """The questions that are trained on."""
    from winnow.env.synthetic_data import made_rows

    data = work / "train.jsonl"
    if not data.exists():
        rows = made_rows("arithmetic", "train")[:QUESTIONS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [*COMMON, f"env.path={data}"]


def summary(run: Run) -> Summary:
    spent, seconds = 0.0, {0: 0.0}
    for row in run.rows:
        spent += row["seconds/generate"] + row["seconds/update"]
        seconds[int(row["step"])] = spent
    return {
        "seed": run.seed,
        "deployed": run.deployed,
        "tokens": run.data.tokens,
        "rollouts": run.data.rollouts,
        "seconds": spent,
        "zero_variance": run.share("frac_reward_zero_std"),
        "curve": run.curve,
        "seconds_at": [round(seconds[p.step], 2) for p in run.data.curve],
        **gate_figures(run, after=COLD_STEPS),
    }


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    new = {arm: [summary(run) for run in found] for arm, found in runs.items()}
    votes = {v["seed"]: v for v in (*said.get("votes", []), *votes_of(work, PREFIX + "arrol"))}
    return said | {
        "machine": machine("cpu"),
        "common": COMMON,
        "runs": t.merged(said.get("runs", {}), new, [arm.name for arm in ARMS]),
        "votes": [votes[seed] for seed in sorted(votes)],
    }


def to_level(head: str, axis: str) -> Column:
    """Cost over GRPO's of the same seed."""

    def cell(runs: list[Summary], base: list[Summary]) -> str:
        pairs = t.paired(runs, base)
        costs = []
        for run, other in pairs:
            level = SHARE * other["curve"][-1][3]
            own, others = (reached(side, level, axis) for side in (run, other))
            if own and others:
                costs.append((own, others))
        missed = len(pairs) - len(costs)
        more = f"; {missed} of {len(pairs)} did not get there" if missed else ""
        return t.text(t.paired_estimate(costs, True), t.TWO) + more

    return Column(head, cell)


def reached(run: Summary, level: float, axis: str) -> float | None:
    """Tokens or seconds at which a run is at a level."""
    spent = run["seconds_at"] if axis == "seconds" else [point[1] for point in run["curve"]]
    curve = [(i, cost, 0, point[3]) for i, (cost, point) in enumerate(zip(spent, run["curve"], strict=True))]
    return t.cost_to(curve, level, "tokens")


COLUMNS = (
    SEEDS,
    t.mean("held-out pass@1", "deployed.pass@1"),
    t.difference("difference", "deployed.pass@1"),
    t.mean("greedy", "deployed.greedy"),
    t.share("groups without signal", "zero_variance"),
    t.ratio("tokens", "tokens"),
    t.ratio("seconds", "seconds"),
    to_level(f"tokens to {SHARE:.0%} of GRPO's pass@1", "tokens"),
    to_level("seconds to it", "seconds"),
)


def tables(said: Said) -> dict[str, str]:
    runs: Figures = {arm.removeprefix(PREFIX): found for arm, found in said["runs"].items()}
    return {
        "llm": t.table_of(runs, COLUMNS, base="grpo"),
        "llm-gate": t.table_of(runs, GATE_COLUMNS, PRUNED),
        "llm-votes": vote_table(said["votes"]),
    }


FAMILY = Family(
    work="llm-claims",
    arms=ARMS,
    collect=collect,
    tables=tables,
    final={"eval_prompts": 256, "eval_generations": 2, "eval_greedy": True},
    seeds=3,
    vote_settings={"eval_prompts": 128},
    prepare=prepare,
)
