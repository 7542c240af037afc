"""The papers' claims on the demo task: trains every arm for every seed, then writes figures and tables.

Each run is a process of its own and leaves `claim.json` in its directory; what is there is not done again, and a run
that was cut off is resumed. Seeds go first to last, so that the arms always have nearly the same number of them.

    python benchmarks/claims.py --seeds 0 1 2 3 --jobs 2 --out benchmarks/results/claims.json --docs docs/claims.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_STEPS = 270
DEPLOYMENT = {
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "eval_top_k": 20,
    "eval_generations": 16,
    "eval_prompts": 256,
}
"""Active-RLOO's deployment sampling (section 4.4), on all held-out puzzles."""


@dataclass(frozen=True)
class Arm:
    """A recipe and what is changed in it."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()


G8 = ("num_generations=8",)
MORE_PROMPTS = ("env.train_size=4096",)
DISCARD = ("rollout_batch.surplus=discard",)
ARMS = (
    Arm("dapo-fixed", "dapo", ("rollout_batch.name=fixed", *DISCARD)),
    Arm("dapo", "dapo"),
    Arm("dapo-adaptive", "dapo", ("rollout_batch.name=adaptive", *DISCARD)),
    Arm("greso", "greso"),
    Arm("uniform", "uniform"),
    Arm("active", "active"),
    Arm("active-adaptive-k", "active-adaptive-k"),
    Arm("lr-const-2x", "lr-const-2x"),
    Arm("lr-ramp", "lr-ramp"),
    Arm("all", "all"),
    Arm("all-two-way", "all", ("group_size.tau=0.6", "group_size.tau_down=0.4", "group_size.dwell=20")),
    Arm("uniform-g8", "uniform", G8),
    Arm("max-at-4-g8", "uniform", (*G8, "advantage={name: max_at_k, k: 4}")),
    Arm("backoff", "greso", ("selector=backoff",)),
    Arm("greso-target-0", "greso", ("selector.target=0",)),
    Arm("greso-target-50", "greso", ("selector.target=0.5",)),
    Arm("greso-target-100", "greso", ("selector.target=1",)),
    Arm("greso-exact", "greso", ("rollout_batch=exact", "max_lag=0")),
    Arm("dapo-fixed-4096", "dapo", ("rollout_batch.name=fixed", *DISCARD, *MORE_PROMPTS)),
    Arm("greso-4096", "greso", MORE_PROMPTS),
    Arm("all-4096", "all", MORE_PROMPTS),
)


def train_arm(arm: Arm, seed: int, work: Path, steps: int | None) -> None:
    """One run, resumed if it was begun, and its evaluation at deployment sampling."""
    from winnow.config import ConfigError, load_config
    from winnow.standalone import evaluate_model
    from winnow.trainer import Trainer

    run = work / f"{arm.name}-s{seed}"
    overrides = [*arm.overrides, f"model={work / f'warm-s{seed}'}", f"seed={seed}", f"output_dir={run}"]
    overrides += ["save_steps=100", "save_total_limit=1", *([f"max_steps={steps}"] if steps else [])]
    config = load_config(ROOT / "recipes" / f"countdown-{arm.recipe}.yaml", overrides)
    if not (run / "model").exists():
        try:
            trainer = Trainer.resume(run) if (run / "config.json").exists() else Trainer(config=config)
        except ConfigError as error:
            raise SystemExit(f"{run}: {error}") from None
        trainer.train()
    deployed = evaluate_model(str(run), DEPLOYMENT)
    _write(run / "claim.json", {"arm": arm.name, "seed": seed, "deployed": deployed})


def warm_start(seed: int, work: Path) -> None:
    from winnow.build import build_demonstrator
    from winnow.standalone import evaluate_model
    from winnow.warmup import WarmupConfig, warmup

    path = work / f"warm-s{seed}"
    if not (path / "config.json").exists():
        warmup(build_demonstrator("countdown"), path, config=WarmupConfig(max_steps=WARM_STEPS, seed=seed, threads=1))
    env = {"name": "countdown", "train_size": 1024}
    values = {"env": env, "max_prompt_length": 32, "max_completion_length": 24, "seed": seed, **DEPLOYMENT}
    _write(path / "claim.json", {"arm": "warm start", "seed": seed, "deployed": evaluate_model(str(path), values)})


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(partial, path)


def _child(arguments: list[str]) -> bool:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    done = subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False)
    state = "done" if done.returncode == 0 else f"FAILED ({done.returncode})"
    print(f"{' '.join(arguments[1:4])}: {state}, {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode == 0


def run_all(arms: list[Arm], seeds: list[int], work: Path, jobs: int, steps: int | None) -> bool:
    """Every missing run, `jobs` at a time, seed by seed."""
    common = ["--work", str(work), *(["--steps", str(steps)] if steps else [])]
    ok = True
    for seed in seeds:
        if not (work / f"warm-s{seed}" / "claim.json").exists():
            ok &= _child(["--one", "warm", str(seed), *common])
        todo = [arm for arm in arms if not (work / f"{arm.name}-s{seed}" / "claim.json").exists()]
        with ThreadPoolExecutor(jobs) as pool:
            ok &= all(list(pool.map(lambda arm, s=seed: _child(["--one", arm.name, str(s), *common]), todo)))
    return ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=[arm.name for arm in ARMS])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, help="fewer steps, to try the script")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "claims")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--docs", type=Path, help="Markdown file whose tables are replaced")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {arm.name: arm for arm in ARMS}
    if unknown := set(options.arms) - set(by_name):
        parser.error(f"unknown arms {sorted(unknown)}; known: {', '.join(by_name)}")
    options.work.mkdir(parents=True, exist_ok=True)
    if options.one:
        name, seed = options.one[0], int(options.one[1])
        if name == "warm":
            warm_start(seed, options.work)
        else:
            train_arm(by_name[name], seed, options.work, options.steps)
        return
    ok = run_all([by_name[name] for name in options.arms], options.seeds, options.work, options.jobs, options.steps)
    if options.out or options.docs:
        from claims_tables import write_figures

        write_figures(options.work, [arm.name for arm in ARMS], out=options.out, docs=options.docs)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
