"""ARRoL against GRPO, random pruning and DAPO, on short and on long answers: every arm for every seed, and tables.

What is finished is not done again, and a run that was cut off is resumed.

    python benchmarks/arrol_claims.py --out benchmarks/results/arrol_claims.json --docs docs/claims.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from arms import ROOT, Arm, read_options, run_all, train, write_json

TASKS = {"countdown": "countdown-arrol", "chain-sum": "chain-sum-arrol"}
"""Task -> recipe."""
WARM: dict[str, dict[str, Any]] = {
    "countdown": {"max_steps": 270},
    "chain-sum": {"max_steps": 900, "batch_size": 32},
}
SHARED = ("chain-sum",)
"""All seeds start from the model of seed 0, which takes minutes to make."""
FINAL = {"eval_generations": 8, "eval_greedy": True}
NO_GATE, DAPO = "gates=[]", "filter=zero_variance"
CHANGES: dict[str, tuple[str, ...]] = {
    "grpo": (NO_GATE,),
    "random": ("gates=[{name: arrol, quality: logprob, strength: 0}]",),
    "arrol": (),
    "dapo": (NO_GATE, DAPO),
    "dapo-arrol": (DAPO,),
    "keep-25": ("gates=[{name: arrol, keep_rate: 0.25}]",),
    "keep-75": ("gates=[{name: arrol, keep_rate: 0.75}]",),
    "literal": ("gates=[{name: arrol, balance: literal}]",),
    "distinct": ("gates=[{name: arrol, balance: distinct}]",),
    "unbiased": ("gates=[{name: arrol, unbiased: true}]",),
    "logprob": ("gates=[{name: arrol, quality: logprob}]",),
}
"""Arm -> what it changes. `random` prunes as much, whatever the prediction; a keep rate of 1 is `grpo`."""
VOTES = ("majority", "deepconf-lowest", "logprob", "head")
"""Answers here are shorter than DeepConf's window, so its lowest, bottom and tail confidence are the same."""


def arms(task: str) -> list[Arm]:
    return [Arm(f"{task}-{name}", TASKS[task], changes) for name, changes in CHANGES.items()]


ARMS = {arm.name: arm for task in TASKS for arm in arms(task)}


def _recipe(task: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{TASKS[task]}.yaml").read_text(encoding="utf-8"))
    return loaded


def warm_model(task: str, seed: int, work: Path) -> None:
    from winnow.run.build import build_demonstrator
    from winnow.run.standalone import evaluate_model
    from winnow.study.warm_start import WarmStartConfig, warm_start

    path, recipe = _model(task, seed, work), _recipe(task)
    if not (path / "config.json").exists():
        warm_start(build_demonstrator(recipe["env"]), path, config=WarmStartConfig(seed=seed, threads=1, **WARM[task]))
    values = {k: v for k, v in recipe.items() if k != "gates"} | {"model": str(path), "seed": seed, **FINAL}
    done = work / f"warm-{task}-s{seed}"
    done.mkdir(exist_ok=True)
    write_json(done / "claim.json", {"arm": "warm start", "seed": seed, "deployed": evaluate_model(str(path), values)})


def _model(task: str, seed: int, work: Path) -> Path:
    return work / f"warm-{task}-s{0 if task in SHARED else seed}"


def train_arm(arm: Arm, seed: int, work: Path) -> None:
    from winnow.run.standalone import evaluate_model
    from winnow.study.vote import vote_model

    task = next(t for t in TASKS if arm.name.startswith(t))
    run = train(arm, seed, work, [f"model={_model(task, seed, work)}"])
    said: dict[str, Any] = {"arm": arm.name, "seed": seed, "deployed": evaluate_model(str(run), FINAL)}
    if arm.name == f"{task}-arrol":
        said["votes"] = vote_model(str(run), {"eval_generations": 32}, VOTES)
    write_json(run / "claim.json", said)


def main() -> None:
    options = read_options(argparse.ArgumentParser(description=__doc__.splitlines()[0]), list(ARMS), "arrol-claims")
    if options.one:
        name, seed = options.one
        if name.startswith("warm-"):
            warm_model(name.removeprefix("warm-"), seed, options.work)
        else:
            train_arm(ARMS[name], seed, options.work)
        return
    warm = [f"warm-{task}" for task in TASKS if any(name.startswith(task) for name in options.arms)]
    ok = run_all(__file__, [warm, options.arms], options.seeds, options.work, options.jobs)
    if options.out or options.docs:
        from arrol_tables import write_figures

        write_figures(options.work, {t: [a.name for a in arms(t)] for t in TASKS}, out=options.out, docs=options.docs)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
