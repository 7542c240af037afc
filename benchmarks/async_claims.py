"""How much lag each method stands: the recipe `countdown-lag`, every variant for every seed, and tables and curves.

What is finished is not done again, and a run that was cut off is resumed. A run that stopped because nothing had a
signal any more (a collapse) counts as finished. Figures of arms that are not in the work directory stay as they are in
the JSON file, and the tables are made from all that is in it. So a few arms can be run alone:

    python benchmarks/async_claims.py --arms lag12-gspo lag12-m2po-mixed --out benchmarks/results/async_claims.json \
        --docs docs/claims.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from arms import ROOT, Arm, read_options, run_all, train, write_json

RECIPE = "countdown-lag"
LAG = 12
"""At which every variant runs."""
VARIANTS = ("plain", "tis2", "tis8", "tis-token", "mis", "deepseek", "m2po", "gspo")
BASELINES = ("opo", "otb", "opob-only", "ess-only", "vcpo", "low-lr", "kl")
SWEEP = {"tis8": (2, 4, 8, 16), "vcpo": (2, 4, 8, 16)}
"""Variant -> further lags."""
MIXED = ("plain", "tis8", "deepseek", "m2po", "gspo", "vcpo", "kl")
"""Variants that also run with rollouts of different lags, 0 to `LAG`, which VCPO (E.2) says is harder for M2PO."""
WARM = {"max_steps": 270}
FINAL = {"eval_generations": 8, "eval_greedy": True}


def _arm(variant: str, lag: int) -> Arm:
    return Arm(f"lag{lag}-{variant}", RECIPE, (f"variant={variant}", f"max_lag={lag}"))


def _mixed(variant: str) -> Arm:
    arm = _arm(variant, LAG)
    return Arm(f"{arm.name}-mixed", RECIPE, (*arm.overrides, "sync={name: in_process, lag: mixed}"))


ARMS = {
    arm.name: arm
    for arm in [
        _arm("tis8", 0),
        *(_arm(variant, LAG) for variant in (*VARIANTS, *BASELINES)),
        *(_mixed(variant) for variant in MIXED),
        *(_arm(variant, lag) for variant, lags in SWEEP.items() for lag in lags),
    ]
}


def warm_model(seed: int, work: Path) -> None:
    from winnow.config import load_config
    from winnow.run.build import build_demonstrator
    from winnow.run.standalone import evaluate_model
    from winnow.study.warm_start import WarmStartConfig, warm_start

    path = work / f"warm-s{seed}"
    recipe = load_config(ROOT / "recipes" / f"{RECIPE}.yaml", [f"model={path}", f"seed={seed}"])
    if not (path / "config.json").exists():
        warm_start(build_demonstrator(recipe.env), path, config=WarmStartConfig(seed=seed, threads=1, **WARM))
    values = recipe.model_dump() | FINAL
    write_json(path / "claim.json", {"arm": "warm", "seed": seed, "deployed": evaluate_model(str(path), values)})


def train_arm(arm: Arm, seed: int, work: Path, steps: int | None) -> None:
    from winnow.record.stop_conditions import RunStoppedError
    from winnow.run.standalone import evaluate_model

    said: dict[str, Any] = {"arm": arm.name, "seed": seed, "stopped": ""}
    run = work / f"{arm.name}-s{seed}"
    try:
        train(arm, seed, work, [f"max_steps={steps}"] if steps else [])
    except (RunStoppedError, FloatingPointError) as error:  # what it had come to is in its last checkpoint
        said["stopped"] = str(error)
    write_json(run / "claim.json", said | {"deployed": evaluate_model(str(run), FINAL)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="fewer steps, to try the script")
    parser.add_argument("--picture", type=Path, help="PNG file for the curves")
    options = read_options(parser, list(ARMS), "async-claims")
    if options.one:
        name, seed = options.one
        if name == "warm":
            warm_model(seed, options.work)
        else:
            train_arm(ARMS[name], seed, options.work, options.steps)
        return
    extra = ["--steps", str(options.steps)] if options.steps else []
    ok = run_all(__file__, [["warm"], options.arms], options.seeds, options.work, options.jobs, *extra)
    if options.out or options.docs or options.picture:
        from async_tables import write_figures

        write_figures(options.work, list(ARMS), out=options.out, docs=options.docs, picture=options.picture)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
