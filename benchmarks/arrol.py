"""What ARRoL's gate costs beside the training step it takes part in: asking, and learning from outcomes.

    python benchmarks/arrol.py --out benchmarks/results/arrol.json

Two models are warm-started and trained on: the demo's task (a dozen tokens an answer, where a step is shortest and the
share largest), and chain sums worked out (about 95 tokens). Engine, rollout and update are the real ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from arms import ROOT, write_json

TASKS = {"countdown": "countdown-arrol", "chain-sum": "chain-sum-arrol"}


class Clock:
    """Seconds spent in some functions since the last look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def measure(task: str, steps: int, directory: Path) -> list[dict[str, float]]:
    """One row a step: seconds of the step, of the gate, and the gate's share."""
    from winnow.build import build_demonstrator
    from winnow.config import load_config
    from winnow.trainer import Trainer
    from winnow.warmup import WarmupConfig, warmup

    recipe = yaml.safe_load((ROOT / "recipes" / f"{TASKS[task]}.yaml").read_text(encoding="utf-8"))
    model = directory / task
    warmup(build_demonstrator(recipe["env"]), model, config=WarmupConfig(max_steps=80, batch_size=32, threads=1))
    cold = 5
    overrides = {
        "model": model,
        "output_dir": directory / f"{task}-run",
        "max_steps": cold + steps,
        "gates": f"[{{name: arrol, cold_start: {cold}}}]",
        "eval_steps": 100_000,
        "max_skipped_steps": 100_000,
    }
    config = load_config(ROOT / "recipes" / f"{TASKS[task]}.yaml", [f"{k}={v}" for k, v in overrides.items()])
    trainer = Trainer(config=config)
    (gate,) = trainer.methods.gates
    clock, rows = Clock(), []
    for name in ("decide", "observe", "metrics"):
        setattr(gate, name, clock.around(getattr(gate, name)))
    end_step, last = clock.around(gate.end_step), time.perf_counter()

    def ended() -> None:
        nonlocal last
        end_step()
        now = time.perf_counter()
        rows.append({"step": now - last, "gate": clock.seconds, "share": clock.seconds / (now - last)})
        clock.seconds, last = 0.0, now

    gate.end_step = ended
    trainer.train()
    return rows[cold + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=40, help="measured, after the gate's cold start")
    options = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory() as directory:
        for task in TASKS:
            rows = measure(task, options.steps, Path(directory))
            result[task] = {
                key: {"median": statistics.median(v), "min": min(v), "max": max(v)}
                for key in ("step", "gate", "share")
                for v in [[row[key] for row in rows]]
            }
            print(task, json.dumps(result[task]), flush=True)
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
