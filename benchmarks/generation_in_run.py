"""Seconds of generation within a run's steps, and of the engine alone for the same tokens, by groups in flight.

    python benchmarks/bench.py generation_in_run --countdown models/countdown --against COMMIT --out in_run.json

A step rolls out a fixed number of groups, trains on all of them, and waits for the last; nothing overlaps, and there
are no drafts. *In the run*: wall seconds from the selection of prompts to the finished groups. *Alone*: seconds of the
same engine for the same requests, given all at once before the update, with the same weights and noise; it samples the
same tokens. The difference is everything around the engine: prompts, texts, rewards, ledger, selector.

Sides take turns in one call, each repeat in a fresh process. `--smollm2`: also SmolLM2-135M on arithmetic.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, in_turn, machine, spread, write_json

WARM_STEPS = 2
GROUPS = {"countdown": (8, 32, 128), "smollm2": (8, 32)}
RECIPES = {"countdown": "thrifty", "smollm2": "arithmetic-smollm2"}
PLAIN = {
    "selector": "uniform",
    "filter": "keep_all",
    "rollout_batch": "exact",
    "max_lag": 0,
    "speculative": False,
    "max_steps": 10**6,
    "save_steps": 10**6,
    "eval_steps": None,
    "threads": "auto",
}


def measure(track: str, model: str, groups: int, steps: int) -> dict[str, float]:
    """Return medians over steps of seconds in the run and alone, and mean sampled tokens of a step."""
    import yaml

    from winnow.config import validate
    from winnow.engine import Finished
    from winnow.run.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        settings = yaml.safe_load((ROOT / "recipes" / f"{RECIPES[track]}.yaml").read_text(encoding="utf-8"))
        settings |= {**PLAIN, "model": model, "output_dir": folder, "prompts_per_step": groups}
        trainer = Trainer(config=validate(settings))
        trainer.step()
        loop = trainer._session.loop  # type: ignore[union-attr]
        engine, collector = loop.sampler.engine, loop.collector  # type: ignore[attr-defined]
        submit, collect = engine.submit, collector.collect
        sent: list[Any] = []
        found: dict[str, list[float]] = {"in_run": [], "alone": [], "tokens": []}

        def recorded(requests: Any) -> None:
            sent.extend(requests := list(requests))
            submit(requests)

        def timed(*args: Any, **options: Any) -> Any:
            sent.clear()
            began = time.perf_counter()
            batch = collect(*args, **options)
            found["in_run"].append(time.perf_counter() - began)
            tokens, began = 0, time.perf_counter()
            submit(sent)
            while engine.pending:
                tokens += sum(len(event.token_ids) for event in engine.step() if isinstance(event, Finished))
            found["alone"].append(time.perf_counter() - began)
            found["tokens"].append(tokens)
            assert tokens == sum(len(rollout.token_ids) for group in batch.finished for rollout in group.rollouts)
            return batch

        engine.submit, collector.collect = recorded, timed
        gc.collect()
        gc.freeze()  # as in `Trainer.train`
        for _ in range(WARM_STEPS + steps):
            trainer.step()
        trainer.close()
    kept = {name: values[WARM_STEPS:] for name, values in found.items()}
    medians = {name: statistics.median(values) for name, values in kept.items()}
    return medians | {"ratio": statistics.median(a / b for a, b in zip(kept["in_run"], kept["alone"], strict=True))}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--countdown", type=Path, help="a warm-started model of Countdown")
    parser.add_argument("--smollm2", action="store_true", help="also SmolLM2-135M on arithmetic")
    parser.add_argument("--against", help="a revision to compare with")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--here", nargs=2, metavar=("TRACK", "GROUPS"), help="measure this process's winnow once")


def run(options: argparse.Namespace) -> None:
    if options.here:
        track, groups = options.here
        model = str(options.countdown.resolve()) if track == "countdown" else "smollm2-135m"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(measure(track, model, int(groups), options.steps)))
        return
    from driver_cost import checkout, in_a_fresh_process  # not above: earlier versions have not all that it imports

    tracks = (["countdown"] if options.countdown else []) + (["smollm2"] if options.smollm2 else [])
    results: dict[str, Any] = {"what": __doc__, "against": options.against, "machine": machine("cpu"), "cells": []}
    with checkout(options.against or "HEAD") as earlier:
        sources = {"now": ROOT / "src"} | ({"before": earlier} if options.against else {})
        cells = [(track, groups) for track in tracks for groups in GROUPS[track]]
        for track, groups in cells:
            arguments = ["generation_in_run", "--here", track, str(groups), "--steps", str(options.steps)]
            arguments += ["--countdown", str(options.countdown.resolve())] if options.countdown else []
            sides = {name: partial(in_a_fresh_process, path, arguments) for name, path in sources.items()}
            rounds = in_turn(sides, options.repeats)
            cell: dict[str, Any] = {"track": track, "groups": groups, "rounds": rounds}
            for name in sides:
                cell[name] = {figure: spread(found[name][figure] for found in rounds) for figure in rounds[0][name]}
                print(track, groups, name, json.dumps(cell[name]), flush=True)
            results["cells"].append(cell)
            write_json(options.out, results)
