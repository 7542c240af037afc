"""Distillation on the demo's task: a small policy learns from a trained one, from rewards, or from both.

    python benchmarks/distill.py            # the teacher, three rates an arm on seed 9, then seeds 0 and 1; 15 minutes

The teacher is Countdown's warm start after DAPO; the policy has a quarter of its parameters. All arms have the same
warm start, prompts and about as many sampled tokens. Rates are chosen by the mean of held-out pass@1 over the tuning
run. Two runs at a time, one thread each. A finished run is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import ROOT, machine, write_json

WORK = ROOT / "build" / "distill"
OUT = ROOT / "benchmarks" / "results" / "distill.json"
STEPS = {"reward": 80, "teacher": 320, "both": 320}
"""About as many sampled tokens: DAPO rolls out several groups for one with a signal."""
EVALUATIONS, LEVEL = 16, 0.1
TUNING, SEEDS = 9, (0, 1)
RATES = (1e-4, 2e-4, 4e-4)
TASK = ("env.train_size=4096", "env.test_size=512", "eval_prompts=256", "eval_greedy=false", "threads=1")
ALONE = ("filter=keep_all", "teacher.reward_weight=0")
ARMS: dict[str, tuple[str, ...]] = {"reward": (), "teacher": ALONE, "both": ("filter=keep_all",)}


def train(directory: Path, *changes: str) -> Path:
    """Train by Countdown's DAPO recipe, unless it is done; return the model's directory."""
    from winnow.config import load_config
    from winnow.run.trainer import Trainer

    if not (directory / "model" / "config.json").exists():
        settings = (*TASK, "save_steps=1000000", f"output_dir={directory}", *changes)
        Trainer(config=load_config(ROOT / "recipes" / "countdown-dapo.yaml", list(settings))).train()
    return directory / "model"


def make_model(name: str, max_steps: int, **options: Any) -> Path:
    from winnow.config import load_config
    from winnow.run.inputs import build_task
    from winnow.study.warm_start import WarmStartConfig, warm_start

    path = WORK / name
    if not (path / "config.json").exists():
        recipe = load_config(ROOT / "recipes" / "countdown-dapo.yaml", [*TASK, f"model={path}"])
        warm_start(build_task(recipe.env), path, config=WarmStartConfig(max_steps=max_steps, threads=1, **options))
    return path


def run_arm(arm: str, rate: float, seed: int) -> None:
    teacher = () if arm == "reward" else (f"teacher.model={WORK / 'teacher' / 'model'}",)
    every = STEPS[arm] // EVALUATIONS
    steps = (f"max_steps={STEPS[arm]}", f"eval_steps={every}", f"learning_rate={rate}", f"seed={seed}")
    train(directory_of(arm, rate, seed), f"model={WORK / 'small'}", *steps, *teacher, *ARMS[arm])


def directory_of(arm: str, rate: float, seed: int) -> Path:
    return WORK / f"{arm}-{rate:g}-s{seed}"


def figures(arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Held-out pass@1 by sampled tokens, and the tokens from which on it is over `LEVEL`."""
    lines = (directory_of(arm, rate, seed) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "eval/pass@1" in row]
    curve = [(int(row["num_tokens"]), round(row["eval/pass@1"], 4)) for row in rows]
    below = [n for n, (_, passed) in enumerate(curve) if passed < LEVEL]
    after = below[-1] + 1 if below else 0
    last = rows[-1]
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "mean_pass@1": sum(passed for _, passed in curve) / len(curve),
        "last_pass@1": curve[-1][1],
        "last_pass@8": last["eval/pass@8"],
        "tokens_to_level": curve[after][0] if after < len(curve) else None,
        "tokens": curve[-1][0],
        "teacher_tokens": last.get("num_teacher_tokens", 0),
        "seconds": last["seconds_total"],
        "curve": curve,
    }


def run_all(jobs: Sequence[tuple[str, float, int]]) -> None:
    """Run each job in a process of its own, two at a time."""

    def child(job: tuple[str, float, int]) -> None:
        command = [sys.executable, __file__, "--one", *map(str, job)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        print(*job, figures(*job)["curve"][-1], flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(child, jobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("ARM", "RATE", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        arm, rate, seed = options.one
        run_arm(arm, float(rate), int(seed))
        return
    make_model("small", 900, hidden_size=64, intermediate_size=192)
    start = make_model("large", 270)
    train(WORK / "teacher", f"model={start}", "max_steps=250", "learning_rate=2e-4", "eval_steps=50", "seed=100")
    run_all([(arm, rate, TUNING) for rate in RATES for arm in ARMS])
    tuned = [figures(arm, rate, TUNING) for arm in ARMS for rate in RATES]
    best = {arm: max((f for f in tuned if f["arm"] == arm), key=lambda f: f["mean_pass@1"])["rate"] for arm in ARMS}
    run_all([(arm, best[arm], seed) for seed in SEEDS for arm in ARMS])
    found = [figures(arm, best[arm], seed) for arm in ARMS for seed in SEEDS]
    write_json(OUT, {"machine": machine("cpu"), "level": LEVEL, "tuning": tuned, "runs": found})
    for run in found:
        print({key: value for key, value in run.items() if key != "curve"})


if __name__ == "__main__":
    main()
