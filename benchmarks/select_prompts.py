"""How long a selector takes to choose a batch, and what its history costs, beside walking the prompts in plain Python.

python benchmarks/select_prompts.py --out benchmarks/results/select.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from winnow.methods.select.greso import Greso, GresoSelector, skip_probability
from winnow.types import Prompt


class Prompts:
    """A million rows without a million objects."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(str(i), i, text="")


def with_history(n: int, longest: int) -> GresoSelector:
    """A selector whose prompts have runs of 0 to `longest` zero-variance visits."""
    selector = Greso().build(Prompts(n), seed=0)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    selector.z_N[:] = rng.integers(0, longest + 1, n)
    selector.kind_N[:] = np.where(selector.z_N > 0, rng.integers(1, 3, n), 0)
    return selector


def plain(order: list[int], z: list[int], p: float, n: int, start: int) -> int:
    """The same choice, one prompt at a time; returns where it ended."""
    kept = 0
    while kept < n:
        kept += random.random() >= skip_probability(z[order[start]], p)
        start += 1
    return start


def measure(n: int, batch: int, longest: int, repeats: int) -> dict[str, Any]:
    selector = with_history(n, longest)
    z, order = selector.z_N.tolist(), selector._order.tolist()
    ours, theirs, position, looked = [], [], 0, []
    gc.collect()
    gc.freeze()  # the plain side's lists are not this benchmark's garbage
    for _ in range(repeats):
        started = time.perf_counter()
        visits = selector.select(batch)
        ours.append(time.perf_counter() - started)
        looked.append(len(visits))
        started = time.perf_counter()
        position = plain(order, z, 0.5, batch, position)
        theirs.append(time.perf_counter() - started)
    arrays = [v for v in vars(selector).values() if isinstance(v, np.ndarray)]
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "prompts": n,
        "batch": batch,
        "visits_looked_at": statistics.median(looked),
        "milliseconds": {"median": 1e3 * statistics.median(ours), "min": 1e3 * min(ours), "max": 1e3 * max(ours)},
        "times_faster_than_plain": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "bytes_a_prompt": sum(a.nbytes for a in arrays) / n,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    results = [measure(1_000_000, batch, longest, options.repeats) for batch in (256, 384) for longest in (2, 5, 10)]
    for result in results:
        print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps({"select": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
