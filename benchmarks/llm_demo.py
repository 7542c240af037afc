"""The demo with a pretrained model for several seeds, and what it solves of word problems before any training.

What is done is not done again, and a run that was cut off is resumed. Overrides are those of `winnow demo-llm`.

    python benchmarks/bench.py llm_demo --seeds 0 1 2 --out benchmarks/results/llm_demo.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ROOT, machine, write_json
from rich.console import Console

LEVELS = ("gsm-1", "gsm-2", "gsm-3")
SAMPLING = ("eval_prompts=64", "eval_generations=4", "max_completion_length=192")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", help="key=value of the demo")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--levels", nargs="*", choices=LEVELS, default=LEVELS)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "llm-demo")


def run(options: argparse.Namespace) -> None:
    found: dict[str, Any] = {"machine": machine("cpu"), "overrides": options.overrides, "seeds": {}, "levels": {}}
    for seed in options.seeds:
        made = options.work / f"seed-{seed}"
        found["seeds"][seed] = _once(made / "summary.json", lambda d=made, s=seed: _train(d, s, options.overrides))
        write_json(options.out, found)
    for level in options.levels:
        found["levels"][level] = _once(options.work / f"{level}.json", lambda name=level: _untrained(name))
        write_json(options.out, found)


def _once(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not file.exists():
        result = measure()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return figures


def _train(directory: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    from winnow.study.demo import run_demo

    found = run_demo(directory, [f"seed={seed}", *overrides], Console(), "llm")
    return {key: value for key, value in found.items() if key not in ("run", "report")}


def _untrained(level: str) -> dict[str, Any]:
    from winnow.config import read_settings
    from winnow.run.standalone import evaluate_model

    data = [f"env.path=made:{level}", f"env.test=made:{level}"]
    return evaluate_model("smollm2-135m", read_settings(ROOT / "recipes" / "gsm-smollm2.yaml", [*data, *SAMPLING]))
