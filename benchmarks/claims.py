"""The papers' claims on the demo task: trains every arm for every seed, then writes figures and tables.

Each run is a process of its own and leaves `claim.json` in its directory; what is there is not done again, and a run
that was cut off is resumed. Seeds go first to last, so that the arms always have nearly the same number of them.

    python benchmarks/claims.py --seeds 0 1 2 3 --jobs 2 --out benchmarks/results/claims.json --docs docs/claims.md

A few arms can be run alone, with `--arms` and the `--tables` to replace; figures of others stay in the JSON file:

    python benchmarks/claims.py --arms uniform active active-band active-adaptive-k active-adaptive-k-band \
        --tables active-band --out benchmarks/results/claims.json --docs docs/claims.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arms import ROOT, Arm, read_options, run_all, train, write_json

WARM_STEPS = 270
DEPLOYMENT = {
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "eval_top_k": 20,
    "eval_generations": 16,
    "eval_prompts": 256,
}
"""Active-RLOO's deployment sampling (section 4.4), on all held-out puzzles."""


G8 = ("num_generations=8",)
MORE_PROMPTS = ("env.train_size=4096",)
DISCARD = ("rollout_batch.surplus=discard",)
ARMS = (
    Arm("dapo-fixed", "countdown-dapo", ("rollout_batch.name=fixed", *DISCARD)),
    Arm("dapo", "countdown-dapo"),
    Arm("dapo-adaptive", "countdown-dapo", ("rollout_batch.name=adaptive", *DISCARD)),
    Arm("greso", "countdown-greso"),
    Arm("uniform", "countdown-uniform"),
    Arm("active", "countdown-active"),
    Arm("active-adaptive-k", "countdown-active-adaptive-k"),
    Arm("active-band", "countdown-active"),
    Arm("active-adaptive-k-band", "countdown-active-adaptive-k"),
    Arm("lr-const-2x", "countdown-lr-const-2x"),
    Arm("lr-ramp", "countdown-lr-ramp"),
    Arm("all", "countdown-all"),
    Arm("all-two-way", "countdown-all", ("group_size.tau=0.6", "group_size.tau_down=0.4", "group_size.dwell=20")),
    Arm("uniform-g8", "countdown-uniform", G8),
    Arm("max-at-4-g8", "countdown-uniform", (*G8, "advantage={name: max_at_k, k: 4}")),
    Arm("backoff", "countdown-greso", ("selector=backoff",)),
    Arm("greso-target-0", "countdown-greso", ("selector.target=0",)),
    Arm("greso-target-50", "countdown-greso", ("selector.target=0.5",)),
    Arm("greso-target-100", "countdown-greso", ("selector.target=1",)),
    Arm("greso-exact", "countdown-greso", ("rollout_batch=exact", "max_lag=0")),
    Arm("dapo-fixed-4096", "countdown-dapo", ("rollout_batch.name=fixed", *DISCARD, *MORE_PROMPTS)),
    Arm("greso-4096", "countdown-greso", MORE_PROMPTS),
    Arm("all-4096", "countdown-all", MORE_PROMPTS),
)


BAND = "-band"
"""Ends the names of arms that leave out what the warm start solves always or never (Active-RLOO, section 4.1)."""


PROFILE = "profile.jsonl"


def pass_rates(seed: int, work: Path) -> None:
    """Those of all training prompts under the warm start of a seed, sixteen rollouts each."""
    from winnow.config import load_config
    from winnow.study.pass_rates import profile_model

    warm, path = str(work / f"warm-s{seed}"), work / f"pass-rates-s{seed}"
    recipe = load_config(ROOT / "recipes" / "countdown-active.yaml", [f"model={warm}", f"seed={seed}"])
    found = profile_model(warm, recipe.model_dump(), n=16, output=path / PROFILE)
    write_json(path / "claim.json", {"arm": "pass rates", "seed": seed, "profile": found})


def train_arm(arm: Arm, seed: int, work: Path, steps: int | None) -> None:
    """One run and its evaluation at deployment sampling."""
    from winnow.run.standalone import evaluate_model

    extra = [f"max_steps={steps}"] if steps else []
    if arm.name.endswith(BAND):
        extra.append(f"selector={{name: pass_rate, profile: {work / f'pass-rates-s{seed}' / PROFILE}}}")
    run = train(arm, seed, work, extra)
    deployed = evaluate_model(str(run), DEPLOYMENT)
    write_json(run / "claim.json", {"arm": arm.name, "seed": seed, "deployed": deployed})


def warm_model(seed: int, work: Path) -> None:
    from winnow.run.build import build_demonstrator
    from winnow.run.standalone import evaluate_model
    from winnow.study.warm_start import WarmStartConfig, warm_start

    path = work / f"warm-s{seed}"
    if not (path / "config.json").exists():
        warm_start(
            build_demonstrator("countdown"), path, config=WarmStartConfig(max_steps=WARM_STEPS, seed=seed, threads=1)
        )
    env = {"name": "countdown", "train_size": 1024}
    values = {"env": env, "max_prompt_length": 32, "max_completion_length": 24, "seed": seed, **DEPLOYMENT}
    write_json(path / "claim.json", {"arm": "warm start", "seed": seed, "deployed": evaluate_model(str(path), values)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="fewer steps, to try the script")
    parser.add_argument("--tables", nargs="+", help="those of --docs to replace; without it all, and the picture")
    by_name = {arm.name: arm for arm in ARMS}
    options = read_options(parser, list(by_name), "claims")
    if options.one:
        name, seed = options.one
        if name == "warm":
            warm_model(seed, options.work)
        elif name == "pass-rates":
            pass_rates(seed, options.work)
        else:
            train_arm(by_name[name], seed, options.work, options.steps)
        return
    extra = ["--steps", str(options.steps)] if options.steps else []
    before = [["warm"], ["pass-rates"]] if any(arm.endswith(BAND) for arm in options.arms) else [["warm"]]
    ok = run_all(__file__, [*before, options.arms], options.seeds, options.work, options.jobs, *extra)
    if options.out or options.docs:
        from claims_tables import write_figures

        write_figures(options.work, list(by_name), out=options.out, docs=options.docs, only=options.tables)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
