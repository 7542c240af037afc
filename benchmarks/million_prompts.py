"""How long selectors take to choose a batch among a million prompts, all visited before.

python benchmarks/bench.py million_prompts --out benchmarks/results/million_prompts.json
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from harness import machine, spread, write_json

from winnow.methods.select import SELECTORS, StreamSelector
from winnow.types import Prompt

PROMPTS, BATCH, REPEATS = 1_000_000, 256, 20


def visited(name: str, prompts: list[Prompt]) -> StreamSelector:
    """A selector that has seen every prompt once: a third each never, half and always solved."""
    selector: Any = SELECTORS[name]().build(prompts, 0)
    right_N = np.array([0, 4, 8], np.float32)[np.arange(PROMPTS) % 3]
    if name == "bayes":
        selector.posteriors.a_N, selector.posteriors.b_N = right_N + 0.3, 8.9 - right_N
    elif name == "thompson":
        selector.right_N, selector.wrong_N = right_N, 8 - right_N
    elif name == "greso":
        selector.z_N[right_N != 4], selector.kind_N[right_N == 8] = 1, 1
        selector.kind_N[right_N == 0] = 2
    return selector  # type: ignore[no-any-return]


def milliseconds(selector: StreamSelector) -> float:
    started = time.perf_counter()
    selector.select(BATCH)
    return 1e3 * (time.perf_counter() - started)


def run(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"what": __doc__, "machine": machine("cpu"), "batch": BATCH, "milliseconds": {}}
    prompts = [Prompt(f"p{i}", i, text="") for i in range(PROMPTS)]
    for name in ("uniform", "greso", "bayes", "thompson"):
        selector = visited(name, prompts)
        result["milliseconds"][name] = spread(milliseconds(selector) for _ in range(REPEATS))
        print(name, result["milliseconds"][name], flush=True)
    write_json(options.out, result)
