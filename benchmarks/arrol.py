"""What the ARRoL gate costs in a training step, and how much faster a step is with it.

    python benchmarks/arrol.py --out benchmarks/results/arrol.json

Two models are warm-started and trained on: the demo's task (a dozen tokens an answer, where a step is shortest and the
share largest), and chain sums worked out (about 95 tokens). Engine, rollout and update are the real ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from harness import ROOT, in_turn, spread, spreads, write_json

TASKS = {"countdown": "countdown-arrol", "chain-sum": "chain-sum-arrol"}
COLD = 5


class Clock:
    """Seconds spent in some functions since it was last set to 0."""

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


def config_of(task: str, model: Path, **changes: Any) -> Any:
    from winnow.config import load_config

    changes = {"output_dir": model.parent / f"{task}-run"} | changes | {"model": model, "eval_steps": 100_000}
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return load_config(ROOT / "recipes" / f"{TASKS[task]}.yaml", [*overrides, "max_skipped_steps=100000"])


def warm_model(task: str, directory: Path, work: Path | None) -> Path:
    """The one that `claims.py arrol` left in `work`, or one made in seconds that solves less."""
    from winnow.run.build import build_demonstrator
    from winnow.study.warm_start import WarmStartConfig, warm_start

    recipe = yaml.safe_load((ROOT / "recipes" / f"{TASKS[task]}.yaml").read_text(encoding="utf-8"))
    model = directory / task
    if work is not None:
        shutil.copytree(work / f"warm-{task}-s0", model)
        return model
    warm_start(
        build_demonstrator(recipe["env"]), model, config=WarmStartConfig(max_steps=150, batch_size=32, threads=1)
    )
    return model


def overhead(task: str, model: Path, steps: int) -> list[dict[str, float]]:
    """One row a step: seconds of the step, of the gate, and the gate's share."""
    from winnow.methods.gate.arrol.rule import ArrolRule
    from winnow.run.trainer import Trainer

    gates = f"[{{name: arrol, cold_start: {COLD}}}]"
    trainer = Trainer(config=config_of(task, model, max_steps=COLD + steps, gates=gates))
    (gate,) = trainer.methods.gates.values()
    clock, rows = Clock(), []
    for name in ("rule", "observe", "metrics"):
        setattr(gate, name, clock.around(getattr(gate, name)))
    decide = ArrolRule.decide
    ArrolRule.decide = clock.around(decide)  # type: ignore[method-assign]
    end_step, last = clock.around(gate.end_step), time.perf_counter()

    def ended() -> None:
        nonlocal last
        end_step()
        now = time.perf_counter()
        rows.append({"step": now - last, "gate": clock.seconds, "share": clock.seconds / (now - last)})
        clock.seconds, last = 0.0, now

    gate.end_step = ended  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        ArrolRule.decide = decide  # type: ignore[method-assign]
    return rows[COLD + 1 : -1]  # the last one includes the evaluation at the end


def phases(task: str, model: Path, steps: int, repeats: int) -> dict[str, list[float]]:
    """How many times faster generation, update and both are with the gate: one ratio a repeat, of median steps."""
    sides = {
        "plain": partial(median_step, task, model, steps, "[]"),
        "pruned": partial(median_step, task, model, steps, f"[{{name: arrol, cold_start: {COLD}}}]"),
    }
    rounds = in_turn(sides, repeats)
    names = ("generate", "update", "both")
    return {name: [found["plain"][name] / found["pruned"][name] for found in rounds] for name in names}


def median_step(task: str, model: Path, steps: int, gates: str) -> dict[str, float]:
    """Seconds of a step after the cold start."""
    from winnow.run.trainer import Trainer

    with tempfile.TemporaryDirectory(dir=model.parent) as run:
        Trainer(config=config_of(task, model, output_dir=f"{run}/run", max_steps=COLD + steps, gates=gates)).train()
        rows = [json.loads(line) for line in Path(run, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [row for row in rows if row["step"] > COLD and "updated" in row]
    found = {phase: statistics.median(row[f"seconds/{phase}"] for row in timed) for phase in ("generate", "update")}
    return found | {"both": found["generate"] + found["update"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=20, help="measured, after the gate's cold start")
    parser.add_argument("--repeats", type=int, default=3, help="of the comparison with and without the gate")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--work", type=Path, help="where `claims.py arrol` ran: take its warm starts")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for task in options.tasks:
            model = warm_model(task, Path(directory), options.work)
            result[task] = spreads(overhead(task, model, options.steps))
            ratios = phases(task, model, options.steps, options.repeats)
            result[task]["times_faster"] = {n: {**spread(v), "repeats": v} for n, v in ratios.items()}
            print(task, json.dumps(result[task]), flush=True)
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
