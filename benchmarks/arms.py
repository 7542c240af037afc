"""What experiments share: arms and seeds as child processes, resumable, finished once their JSON file is there."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Arm:
    """A recipe and what is changed in it."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()


def read_options(
    parser: argparse.ArgumentParser, arms: Sequence[str], work: str, *, jobs: int = 2, seeds: int = 4
) -> Any:
    """Command line of an experiment: its own options, and what all have. Exits when an arm is unknown.

    `work` names the directory of its runs; `one` is (arm, seed) in the child process of a single job, else None.
    """
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(seeds)))
    parser.add_argument("--arms", nargs="+", default=list(arms))
    parser.add_argument("--jobs", type=int, default=jobs, help="runs at a time, one thread each")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / work)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--docs", type=Path, help="Markdown file whose tables are replaced")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.arms) - set(arms):
        parser.error(f"unknown arms {sorted(unknown)}; known: {', '.join(arms)}")
    if options.one is not None:
        options.one = options.one[0], int(options.one[1])
    return options


def train(arm: Arm, seed: int, work: Path, extra: Sequence[str] = ()) -> Path:
    """One run from the warm start of its seed, resumed if it was begun; returns its directory."""
    from winnow.config import ConfigError, load_config
    from winnow.run.trainer import Trainer

    run = work / f"{arm.name}-s{seed}"
    overrides = [*arm.overrides, f"model={work / f'warm-s{seed}'}", f"seed={seed}", f"output_dir={run}"]
    overrides += ["save_steps=100", "save_total_limit=1", *extra]
    config = load_config(ROOT / "recipes" / f"{arm.recipe}.yaml", overrides)
    if not (run / "model").exists():
        try:
            trainer = Trainer.resume(run) if (run / "config.json").exists() else Trainer(config=config)
        except ConfigError as error:
            raise SystemExit(f"{run}: {error}") from None
        trainer.train()
    return run


def write_json(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(partial, path)


def fill(docs: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end -->`. Exits when there is no such place."""
    text = docs.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, flags=re.DOTALL):
            raise SystemExit(f"{docs}: has no place for the table '{name}' (<!-- {name} --> ... <!-- end -->)")
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}{t}{m[2]}", text, flags=re.DOTALL)
    docs.write_text(text, encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def run_all(
    script: str, stages: Sequence[Sequence[str]], seeds: Sequence[int], work: Path, jobs: int, *extra: str
) -> bool:
    """Every job that has left no `claim.json`, as `SCRIPT --one NAME SEED`: seed by seed, a stage after the other.

    `jobs` run at a time, one thread each. Returns whether all of them succeeded.
    """
    work.mkdir(parents=True, exist_ok=True)
    ok = True
    for seed in seeds:
        for stage in stages:
            todo = [name for name in stage if not (work / f"{name}-s{seed}" / "claim.json").exists()]
            calls = [["--one", name, str(seed), "--work", str(work), *extra] for name in todo]
            with ThreadPoolExecutor(jobs) as pool:
                ok &= all(list(pool.map(lambda call: _child(script, call), calls)))
    return ok


def _child(script: str, arguments: list[str]) -> bool:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    done = subprocess.run([sys.executable, script, *arguments], env=environment, check=False)
    state = "done" if done.returncode == 0 else f"FAILED ({done.returncode})"
    print(f"{' '.join(arguments[1:3])}: {state}, {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode == 0
