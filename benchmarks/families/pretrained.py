"""The papers' methods with a pretrained model of 135M parameters on arithmetic."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import tables as t
from families import stopping
from families.base import Arm, Family
from tables import SEEDS, Figures

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
COLD_STEPS = 6
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


def prepare(work: Path) -> list[str]:
    """The questions that are trained on."""
    from winnow.env.synthetic_data import made_rows

    data = work / "train.jsonl"
    if not data.exists():
        rows = made_rows("arithmetic", "train")[:QUESTIONS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [*COMMON, f"env.path={data}"]


COLUMNS = (
    SEEDS,
    t.mean("held-out pass@1", "deployed.pass@1"),
    t.difference("difference", "deployed.pass@1"),
    t.mean("greedy", "deployed.greedy"),
    t.share("groups without signal", "zero_variance"),
    t.ratio("tokens", "tokens"),
    t.ratio("seconds", "seconds"),
    t.to_level("tokens to 95% of GRPO's pass@1", 0.95),
    t.to_level("seconds to it", 0.95, "seconds"),
)


def tables(runs: Figures) -> dict[str, str]:
    base = "arithmetic-grpo"
    pruned = [f"arithmetic-{arm}" for arm in ("grpo-16", "arrol", "all")]
    return {
        "pretrained": t.table_of(runs, COLUMNS, base=base),
        "pretrained-gate": t.table_of(runs, stopping.GATE_COLUMNS, pruned),
        "pretrained-votes": stopping.vote_table(runs.get("arithmetic-arrol", [])),
    }


FAMILY = Family(
    work="llm-claims",
    arms=tuple(
        Arm(f"arithmetic-{name}", RECIPE, changes, votes=stopping.VOTES if name == "arrol" else ())
        for name, changes in CHANGES.items()
    ),
    tables={"llm_claims.json": tables},
    of_run=partial(stopping.of_run, after=COLD_STEPS),
    final={"eval_prompts": 256, "eval_generations": 2, "eval_greedy": True},
    seeds=3,
    vote_settings={"eval_prompts": 128},
    prepare=prepare,
)
