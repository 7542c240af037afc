"""Processor seconds of an update, of this source tree and of another one, on the same synthetic rows in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/bench.py update MODEL --before /tmp/before --tokens 12 --shared 0.4 --out FILE

Each side runs in its own process, which packs the rows, computes the gradient and steps AdamW, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from harness import BENCH, ROOT, in_turn, machine, read_json, spread, write_json

from winnow.engine.loading import CPU, load_causal_lm, load_tokenizer
from winnow.learner.base import Policy
from winnow.learner.context import LearnerContext
from winnow.learner.local.learner import LearnerOptions, Local
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.types import Rollout


def rows_of(options: argparse.Namespace, vocabulary: int) -> list[Row]:
    """Groups whose siblings begin like an earlier one, for a share of their tokens that is `shared` on average."""
    rng = np.random.default_rng(0)
    n, rows = options.tokens, []
    for _ in range(options.groups):
        prompt = tuple(rng.integers(vocabulary, size=options.prompt).tolist())
        siblings: list[np.ndarray] = []
        for number in range(options.size):
            tokens = rng.integers(vocabulary, size=n)
            if siblings:
                same = round(n * rng.beta(4 * options.shared, 4 * (1 - options.shared)))
                tokens[:same] = siblings[rng.integers(number)][:same]
            siblings.append(tokens)
            logp, version = np.full(n, -3, np.float32), np.zeros(n, np.int32)
            rollout = Rollout(number, prompt, tokens, np.ones(n, bool), logp, version)
            rows.append(Row(rollout, 1.0 if number % 2 else -1.0, 1 / (options.groups * options.size * n)))
    return rows


def serve(options: argparse.Namespace) -> None:
    """Make an update for every line of the input; print its processor seconds."""
    torch.set_num_threads(1)
    model = load_causal_lm(options.model, CPU)
    learner = Local().build(
        Policy(model, load_tokenizer(options.model), None), LearnerContext(LearnerOptions(), device="cpu")
    )
    rows = rows_of(options, model.config.vocab_size)
    for _ in sys.stdin:
        fresh = [Row(row.rollout, row.advantage, row.weight) for row in rows]
        started = time.process_time()
        learner.accumulate(fresh, LossConfig())
        norm = learner.apply(1e-5)
        print(json.dumps({"seconds": time.process_time() - started, "grad_norm": norm}), flush=True)


def side(stack: ExitStack, tree: Path, arguments: list[str]) -> Callable[[], dict[str, float]]:
    """Start `serve` with the package of a source tree."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, str(BENCH), "update", *arguments, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tree / "src")},
        )
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    return partial(_answer, process.stdin, process.stdout)


def _answer(requests: IO[str], answers: IO[str]) -> dict[str, float]:
    print(file=requests, flush=True)
    return dict(json.loads(answers.readline()))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model")
    parser.add_argument("--before", type=Path, default=ROOT, help="the other source tree")
    parser.add_argument("--name", default="update", help="key of the results in the file")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--shared", type=float, default=0.4, help="share of its tokens that a sibling copies")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.serve:
        serve(options)
        return
    given = {key: getattr(options, key) for key in ("groups", "size", "prompt", "tokens", "shared")}
    arguments = [options.model, *(word for key, value in given.items() for word in (f"--{key}", str(value)))]
    with ExitStack() as stack:
        sides = {name: side(stack, tree, arguments) for name, tree in (("before", options.before), ("now", ROOT))}
        rounds = in_turn(sides, options.repeats, warm=True)
    seconds = {name: spread(found[name]["seconds"] for found in rounds) for name in sides}
    ratio = spread(found["now"]["seconds"] / found["before"]["seconds"] for found in rounds)
    norms = {name: rounds[0][name]["grad_norm"] for name in sides}
    results = read_json(options.out)
    results[options.name] = given | {"machine": machine("cpu"), "seconds": seconds, "ratio": ratio, "grad_norm": norms}
    print(json.dumps(results[options.name]), flush=True)
    write_json(options.out, results)
