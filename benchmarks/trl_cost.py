"""What a method of Winnow's costs inside TRL: steps of `WinnowGRPOTrainer` with it, and of TRL alone beside them.

    python benchmarks/bench.py trl_cost --out benchmarks/results/trl_cost.json

One process and thread, measured in its CPU seconds, so that others on the machine hardly matter. TRL alone runs beside
each method, in turn and from the same weights; a ratio is the mean step of the method over that of TRL alone in the
same round, without each run's first step. A method that changes what is rolled out or trained does other work than TRL
alone: the rollouts sampled and trained a step are beside its time.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import in_turn, machine, spread, write_json
from step import Marks, train_by_trl
from trl import GRPOTrainer

from winnow.integrations.trl import WinnowGRPOTrainer
from winnow.record.ledger import Ledger
from winnow.study.warm_start import WarmStartConfig, warm_start
from winnow.tasks.countdown import CountdownConfig, countdown_reward

PROMPTS, G, STEPS, ROUNDS = 16, 8, 2, 3
ARMS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "greso": {"selector": "greso"},
    "zero_variance, refill": {"filter": "zero_variance"},
    "zero_variance, no refill": {"filter": {"name": "zero_variance", "refill": False}},
    "opob": {"advantage": "opob"},
    "adaptive_k": {"group_size": {"name": "adaptive_k", "tau": 0.1, "window": 1}},
    "engine: local": {"engine": "local"},
    "engine: local, ess": {"engine": "local", "step_scale": "ess"},
    "arrol": {"gates": [{"name": "arrol", "cold_start": 1, "at": 4}]},
}


def one_run(start: Path, methods: Mapping[str, Any] | None) -> dict[str, float]:
    """Mean CPU seconds of a step after the first, and rollouts a step; `methods` None: TRL alone."""
    clock, task = Marks(time.process_time), CountdownConfig().build()
    with tempfile.TemporaryDirectory() as out:
        train_by_trl(
            GRPOTrainer if methods is None else WinnowGRPOTrainer,
            start,
            [{"prompt": p.text, **p.columns} for p in task.train],
            countdown_reward,
            clock,
            methods=methods or {},
            output_dir=out,
            per_device_train_batch_size=PROMPTS * G,
            num_generations=G,
            max_completion_length=24,
            learning_rate=1e-5,
            max_steps=STEPS + 1,
            bf16=False,
        )
        found = {"seconds": (clock.marks[-1] - clock.marks[0]) / STEPS, "sampled": PROMPTS * G, "trained": PROMPTS * G}
        if methods is not None:
            lines = [json.loads(x) for x in (Path(out) / "winnow" / "metrics.jsonl").read_text().splitlines()][1:]
            found["sampled"] = statistics.mean(line["rollouts/sampled"] for line in lines)
            with Ledger.open(Path(out) / "winnow" / "ledger.sqlite", read_only=True) as ledger:
                found["trained"] = ledger.totals()["trained"]["rollouts"] / (STEPS + 1)
    return found


def run(options: argparse.Namespace) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        start = Path(work) / "start"
        warm_start(CountdownConfig().build(), start, config=WarmStartConfig(max_steps=270, threads=1))
        result: dict[str, Any] = {"machine": machine("cpu", "trl"), "prompts": PROMPTS, "group": G, "arms": {}}
        for name, methods in ARMS.items():
            sides = {"alone": partial(one_run, start, None), "winnow": partial(one_run, start, methods)}
            rounds = in_turn(sides, ROUNDS)
            ratio = spread(found["winnow"]["seconds"] / found["alone"]["seconds"] for found in rounds)
            result["arms"][name] = {"ratio": ratio, "rounds": rounds}
            write_json(options.out, result)
            print(name, {k: round(v, 2) for k, v in ratio.items()}, flush=True)
