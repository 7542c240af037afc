"""CPU seconds of a decode step by rows, a + b * rows, and of generating groups; another version's against this one's.

    git worktree add /tmp/other COMMIT
    python benchmarks/bench.py decode_cost --other /tmp/other --out benchmarks/results/decode_cost.json
    ... --model models/countdown --config recipes/countdown-dapo.yaml      # groups are generated, too

Both versions take turns, each in a process of its own with one thread. Every row has a sequence of its own, and none
ends before the others. A step's cost is the lowest decile, a generation's the best of three: what else runs adds to
both. With `--model`, groups are rolled out too, rewards included, for each number of slots.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import BENCH, ROOT, in_turn, machine, spreads, write_json

ROWS = (8, 32, 64, 128, 256)
STEPS = 40
MS = 1000


def step_cost() -> dict[str, float]:
    """Return milliseconds of a step for each number of rows, and `a` and `b`, in milliseconds too."""
    from engine import VOCAB, make_model, make_tokenizer

    from winnow.base.noise import noise_key
    from winnow.engine import LocalEngine, Request, SamplingParams

    engine = LocalEngine(make_model("0.7M", "cpu"), make_tokenizer(), slots=max(ROWS))
    rng, cost = np.random.default_rng(0), dict[str, float]()
    for rows in (*ROWS, *ROWS):  # the first time warms up
        prompts = rng.integers(1, VOCAB, (rows, 14)).tolist()
        params = SamplingParams(STEPS)
        engine.submit([Request(i, tuple(p), params, noise_key(0, i)) for i, p in enumerate(prompts)])
        engine.step()
        times = []
        while engine.pending:
            started = time.process_time()
            engine.step()
            times.append(time.process_time() - started)
        cost[str(rows)] = MS * float(np.quantile(times, 0.1))
    b, a = np.polyfit(ROWS, [cost[str(rows)] for rows in ROWS], 1)
    return cost | {"a": float(a), "b": float(b)}


def generation_cost(options: argparse.Namespace) -> dict[str, float]:
    """Return CPU seconds of rolling out groups, for each number of slots."""
    from winnow.config import load_config
    from winnow.run.inputs import build_task
    from winnow.run.standalone import opened
    from winnow.types import Job, Visit

    cost = {}
    for slots in options.slots:
        c = load_config(
            options.config, [f"model={options.model}", "gates=[]", f"engine={{name: local, slots: {slots}}}"]
        )
        task = build_task(c.env)
        with opened(c, task) as (_, roll_out, _rewarder):
            times = []
            for number in range(4):
                prompts = task.train[number * options.groups : (number + 1) * options.groups]
                started = time.process_time()
                groups = list(roll_out([Job(Visit(p.ordinal, 0, p), c.num_generations) for p in prompts]))
                times.append(time.process_time() - started)
            cost[f"{slots} slots"] = min(times[1:])  # the first one warms up
            cost["tokens"] = float(sum(int(r.action_mask.sum()) for group in groups for r in group.rollouts))
    return cost


def in_version(root: Path, arguments: list[str]) -> dict[str, float]:
    """Return what this benchmark finds with the package under `root`."""
    env = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH), "decode_cost", "--child", *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--other", type=Path, help="root of another version's checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="a policy to generate groups with")
    parser.add_argument("--config", type=Path, help="of these groups")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.child:
        torch.set_num_threads(1)
        print(json.dumps(generation_cost(options) if options.model else step_cost()))
        return
    versions = {"this": ROOT} | ({"other": options.other} if options.other else {})
    kinds: dict[str, list[str]] = {"step, ms": []}
    if options.model:
        slots = ["--slots", *map(str, options.slots)]
        own = ["--model", options.model, "--config", str(options.config), "--groups", str(options.groups), *slots]
        kinds["generation, s"] = own
    found: dict[str, Any] = {"what": __doc__, "machine": machine("cpu")}
    for kind, arguments in kinds.items():
        rounds = in_turn(
            {name: partial(in_version, root, arguments) for name, root in versions.items()}, options.repeats
        )
        found[kind] = {name: spreads([each[name] for each in rounds]) for name in versions}
        for name, figures in found[kind].items():
            print(kind, name, {key: round(value["median"], 4) for key, value in figures.items()}, flush=True)
    write_json(options.out, found)
