"""The papers' claims with a pretrained model of 135M parameters on arithmetic: every arm for every seed, and tables.

What is finished is not done again, and a run that was cut off is resumed.

    python benchmarks/llm_claims.py --out benchmarks/results/llm_claims.json --docs docs/claims.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import claims_figures as f
import summaries as sm
from arms import Arm, fill, read_options, run_all, table, train, write_json
from arrol_tables import gate_figures, gate_table, vote_table, votes_of
from claims_tables import percent, text

from winnow.study.compare import reached_at
from winnow.study.compare_data import Point

RECIPE, MODEL = "arithmetic-smollm2", "smollm2-135m"
STEPS = 18
QUESTIONS = 96
"""Of the training set: with 16 of them a step three epochs, as GRESO knows a prompt only from an epoch before."""
COMMON = (
    f"model={MODEL}",
    "threads=1",
    f"max_steps={STEPS}",
    "eval_steps=6",
    "eval_prompts=128",
    "eval_generations=2",
    "eval_greedy=false",
    "save_steps=9",
)
FINAL = {"eval_prompts": 256, "eval_generations": 2, "eval_greedy": True}
VOTES = ("majority", "logprob", "head")
SHARE = 0.95
"""Of what GRPO ends with on a seed: the level to which costs are compared."""

GRPO = ("advantage=grpo", "filter=keep_all", "policy_loss=clip", "loss_type=grpo", "correction=none")
DAPO = ("advantage=grpo", "policy_loss=clip", "loss_type=dapo", "epsilon_high=0.28", "correction=none")
REFILL = "filter=zero_variance"
FIXED = "rollout_batch={name: fixed, surplus: discard}"
GRESO = ("selector=greso", "rollout_batch=adaptive", "max_lag=1")
ADAPTIVE = ("num_generations=4", "prompts_per_step=32", "group_size={name: adaptive_k, tau: 0.5, window: 5}")
GATE = "gates=[{name: arrol, cold_start: 6}]"
SIXTEEN = ("num_generations=16", "prompts_per_step=8")
LAG = ("max_lag=8", "correction={name: truncate, level: sequence, high: 8}")
VCPO = ("advantage=opob", "step_scale=ess")
ARMS = {
    arm.name: arm
    for arm in (
        Arm("arithmetic-grpo", RECIPE, GRPO),
        Arm("arithmetic-lag8", RECIPE, LAG),
        Arm("arithmetic-dapo", RECIPE, (*DAPO, REFILL, FIXED)),
        Arm("arithmetic-greso", RECIPE, (*DAPO, REFILL, *GRESO)),
        Arm("arithmetic-rloo", RECIPE),
        Arm("arithmetic-active-adaptive-k", RECIPE, ADAPTIVE),
        Arm("arithmetic-grpo-16", RECIPE, (*GRPO, *SIXTEEN)),
        Arm("arithmetic-arrol", RECIPE, (*GRPO, *SIXTEEN, GATE)),
        Arm("arithmetic-lag8-vcpo", RECIPE, (*LAG, *VCPO)),
        Arm("arithmetic-all", RECIPE, (REFILL, ADAPTIVE[-1], *GRESO, *LAG[1:], *VCPO, GATE)),
    )
}
"""`rloo` is the recipe itself. All have 128 rollouts a step, but for those that size or refill it themselves.
Runs with a lag of 8 hold nine copies of the weights (5 GB), so they are far apart in this list."""


def train_arm(arm: Arm, seed: int, work: Path, extra: list[str]) -> None:
    from winnow.env.synthetic_data import made_rows
    from winnow.run.standalone import evaluate_model
    from winnow.study.vote import vote_model

    data = work / "train.jsonl"
    if not data.exists():
        rows = made_rows("arithmetic", "train")[:QUESTIONS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = train(arm, seed, work, [*COMMON, f"env.path={data}", *extra])
    said: dict[str, Any] = {"arm": arm.name, "seed": seed, "deployed": evaluate_model(str(run), FINAL)}
    if arm.name == "arithmetic-arrol":
        said["votes"] = vote_model(str(run), {"eval_prompts": 128, "eval_generations": 32}, VOTES)
    write_json(run / "claim.json", said)


def summary(run: f.Run) -> dict[str, Any]:
    spent, seconds = 0.0, {0: 0.0}
    for row in run.rows:
        spent += row["seconds/generate"] + row["seconds/update"]
        seconds[int(row["step"])] = spent
    return {
        "seed": run.data.seed,
        "deployed": {key: value for key, value in run.deployed.items() if key != "model"},
        "tokens": run.data.tokens,
        "rollouts": run.data.rollouts,
        "seconds": spent,
        "zero_variance": f.zero_share(run, 0.0, 1.0),
        "curve": [[p.step, p.tokens, p.rollouts, round(p.passed, 5)] for p in run.data.curve],
        "seconds_at": [round(seconds[p.step], 2) for p in run.data.curve],
        **gate_figures(run, after=6),
    }


def main_table(runs: sm.Figures) -> str:
    base, rows = runs["arithmetic-grpo"], []
    for arm, found in runs.items():
        rows.append(
            [
                arm.removeprefix("arithmetic-"),
                str(len(found)),
                text(sm.over_seeds(found, sm.passed)),
                "" if found is base else text(sm.difference(found, base, sm.passed), "{:+.3f}"),
                text(sm.over_seeds(found, lambda r: r["deployed"]["greedy"])),
                percent(sm.over_seeds(found, lambda r: r["zero_variance"])),
                text(sm.ratio(found, base, lambda r: r["tokens"]), "{:.2f}"),
                text(sm.ratio(found, base, lambda r: r["seconds"]), "{:.2f}"),
                to_level(found, base, "tokens"),
                to_level(found, base, "seconds"),
            ]
        )
    head = ["arm", "seeds", "held-out pass@1", "difference", "greedy", "groups without signal", "tokens", "seconds"]
    return table([*head, f"tokens to {SHARE:.0%} of GRPO's pass@1", "seconds to it"], rows)


def to_level(found: list[sm.Summary], base: list[sm.Summary], axis: str) -> str:
    """Cost over GRPO's of the same seed."""
    pairs = sm.paired(found, base)
    costs = [[_reached(run, SHARE * b["curve"][-1][3], axis) for run in (a, b)] for a, b in pairs]
    both = [(a, b) for a, b in costs if a and b]
    missed = f"; {len(pairs) - len(both)} of {len(pairs)} did not get there" if len(both) < len(pairs) else ""
    return text(f.ratio(both), "{:.2f}") + missed


def _reached(run: sm.Summary, level: float, axis: str) -> float | None:
    costs = run["seconds_at"] if axis == "seconds" else [point[1] for point in run["curve"]]
    curve = [Point(i, cost, 0, point[3]) for i, (cost, point) in enumerate(zip(costs, run["curve"], strict=True))]
    return reached_at(curve, level, lambda point: point.tokens)


def write_figures(work: Path, out: Path | None, docs: Path | None) -> None:
    """Arms and seeds without a finished run in `work` are as they were in `out`, or left out."""
    from machine import machine

    said: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    found, _ = f.read_runs(work, list(ARMS))
    new = {arm: [summary(run) for run in by_seed.values()] for arm, by_seed in found.items()}
    runs = sm.merged(said.get("runs", {}), new, list(ARMS))
    by_seed = {v["seed"]: v for v in (*said.get("votes", []), *votes_of(work, "arithmetic-arrol"))}
    votes = [by_seed[seed] for seed in sorted(by_seed)]
    said |= {"machine": machine("cpu"), "common": COMMON, "runs": runs, "votes": votes}
    if out is not None:
        write_json(out, said)
    if docs is not None:
        gated = {arm.removeprefix("arithmetic-"): runs[arm] for arm in runs if arm.endswith(("-16", "-arrol", "-all"))}
        tables = {"llm": main_table(runs), "llm-gate": gate_table(gated), "llm-votes": vote_table(votes)}
        fill(docs, tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changes", nargs="*", default=[], help="key=value of every run, to try the script")
    options = read_options(parser, list(ARMS), "llm-claims", seeds=3)
    if options.one:
        train_arm(ARMS[options.one[0]], options.one[1], options.work, options.changes)
        return
    changes = ["--changes", *options.changes] if options.changes else []
    ok = run_all(__file__, [options.arms], options.seeds, options.work, options.jobs, *changes)
    if options.out or options.docs:
        write_figures(options.work, options.out, options.docs)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
