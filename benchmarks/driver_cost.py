"""What a group costs outside the engine: CPU milliseconds of a run's driver, by part, and of an earlier version.

    python benchmarks/bench.py driver_cost --model models/countdown --against COMMIT --out driver_cost.json

A run of `recipes/thrifty.yaml` without evaluations. Sides take turns in one call, each repeat in a fresh process. The
unit is CPU time of the process (all threads), divided by the groups that were rolled out:

    launch    drafts, environments, requests
    poll      turns, texts, rewards, groups in order
    ledger    visits, fates and steps booked
    collect   everything else of a step: selector, judge, filter, buffer, tally, records

Engine (`step`, `cancel`, `load_weights`), update and publishing are left out. There are 512 prompts, so that they have
been visited before: they have drafts, and their tokens are known.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from harness import BENCH, ROOT, in_turn, machine, write_json
from scale_driver import Shares

RECIPE = ROOT / "recipes" / "thrifty.yaml"
PARTS = ("launch", "poll", "ledger", "collect")
WARM_STEPS = 3


def measure(model: Path, steps: int) -> dict[str, Any]:
    """Return CPU milliseconds a group by part, over `steps` steps after `WARM_STEPS` others."""
    import yaml

    from winnow.base.machine import heap_frozen
    from winnow.config import validate
    from winnow.run.trainer import Trainer

    shares = Shares()
    with tempfile.TemporaryDirectory() as folder:
        settings = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
        settings["env"]["train_size"] = 512
        settings |= {"model": str(model), "output_dir": folder, "max_steps": 10**6, "eval_steps": None}
        trainer = Trainer(config=validate(settings | {"save_steps": 10**6}))
        for _ in range(WARM_STEPS):
            trainer.step()
        loop = trainer._session.loop  # type: ignore[union-attr]
        sampler, ledger = loop.sampler, loop.collector.ledger
        for owner, names, part in (
            (sampler, ("launch",), "launch"),
            (sampler, ("poll",), "poll"),
            (sampler.engine, ("step", "cancel", "load_weights"), "engine"),  # type: ignore[attr-defined]
            (ledger, ("visit", "finish", "step"), "ledger"),
            (loop.optimizer_step, ("_update",), "update"),
            (loop, ("publish",), "update"),
        ):
            for name in names:
                shares.watch(owner, name, part)
        groups, end_step = 0, loop.collector.end_step

        def counted(*args: Any) -> dict[str, float]:
            nonlocal groups
            groups += loop.collector.tally.groups
            return end_step(*args)

        loop.collector.end_step = counted  # type: ignore[method-assign]
        shares.book()
        shares.seconds.clear()
        with heap_frozen():  # as in `Trainer.train`
            for _ in range(steps):
                trainer.step()
        shares.book()
        trainer.close()
    seconds = shares.seconds
    seconds["collect"] = seconds.pop("loop")
    found = {part: round(1000 * seconds[part] / groups, 4) for part in PARTS}
    found["total"] = round(sum(found.values()), 4)
    others = {part: round(1000 * seconds[part] / groups, 4) for part in ("engine", "update")}
    return {"ms_a_group": found, "elsewhere_ms_a_group": others, "groups": groups}


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Yield a folder with the sources of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", revision, "src"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder) / "src"


def in_a_fresh_process(sources: Path, arguments: Sequence[str], threads: int | None = None) -> dict[str, Any]:
    """Return what a benchmark with these arguments prints last, with the sources of a revision."""
    environment = os.environ | {"PYTHONPATH": str(sources)} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    command = [sys.executable, str(BENCH), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a warm-started model of Countdown")
    parser.add_argument("--against", help="a revision to compare with")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="measure this process's winnow once")


def run(options: argparse.Namespace) -> None:
    if options.here:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(measure(options.model.resolve(), options.steps)))
        return
    options.model = options.model.resolve()
    with checkout(options.against or "HEAD") as earlier:
        sources = {"now": ROOT / "src"} | ({"before": earlier} if options.against else {})
        arguments = ["driver_cost", "--here", "--model", str(options.model), "--steps", str(options.steps)]
        sides = {name: partial(in_a_fresh_process, path, arguments, 1) for name, path in sources.items()}
        rounds = in_turn(sides, options.repeats)
    results: dict[str, Any] = {"what": __doc__, "against": options.against, "machine": machine("cpu"), "rounds": rounds}
    for name in sides:
        turns = [found[name]["ms_a_group"] for found in rounds]
        results[name] = {part: statistics.median(turn[part] for turn in turns) for part in (*PARTS, "total")}
        print(name, json.dumps(results[name]))
    write_json(options.out, results)
