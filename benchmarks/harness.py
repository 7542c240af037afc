"""What benchmarks of speed share: sides that take turns, ratios of their figures, and the machine they ran on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from winnow.base import __version__
from winnow.base.machine import processor

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "benchmarks" / "bench.py"
Found = TypeVar("Found")


def in_turn(sides: Mapping[str, Callable[[], Found]], repeats: int, warm: bool = False) -> list[dict[str, Found]]:
    """Run all sides once in every repeat, in changing order, so that a busy machine disturbs all of them alike.

    `warm`: one repeat more, which comes first and does not count.
    """
    rounds = []
    for repeat in range(repeats + warm):
        order = list(sides) if repeat % 2 == 0 else list(sides)[::-1]
        found = {name: sides[name]() for name in order}
        if repeat or not warm:
            rounds.append({name: found[name] for name in sides})
    return rounds


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Of each figure that all rows have."""
    return {key: spread(row[key] for row in rows) for key in rows[0]}


def read_json(path: Path | None) -> dict[str, Any]:
    """What a results file has; nothing without one."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path and path.exists() else {}


def write_json(path: Path | None, value: Any) -> None:
    """All of it or nothing; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def machine(device: str, *packages: str) -> dict[str, Any]:
    """Processor, cores, load and versions, as benchmarks keep them with their figures."""
    import torch

    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", *packages)},
        "winnow-rl": __version__,  # also of a checkout that is not installed
    }


def in_a_process(name: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark with these arguments prints last, in a fresh process."""
    done = subprocess.run([sys.executable, str(BENCH), name, *arguments], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def matmul_rate(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of a large matrix product with the threads that are set, the best of a few."""
    import torch

    a = torch.randn(2048, 2048).to(dtype)
    times = []
    for _ in range(12):
        started = clock()
        a @ a
        times.append(clock() - started)
    return 2 * 2048**3 / min(times)
