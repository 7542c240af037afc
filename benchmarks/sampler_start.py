"""What it takes to start a sampler process: forked off a server that has its imports, beside an interpreter of its own.

python benchmarks/sampler_start.py --out benchmarks/results/sampler_start.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from machine import machine

from winnow.base.forkserver import forkserver
from winnow.run import serve  # noqa: F401  (what a sampler imports)

SAMPLERS = 4
"""At a time, for their memory."""
HERE = Path(__file__).resolve().parent


def begin() -> None:
    """A sampler that has come so far as to take orders."""
    shared = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    print(json.dumps({"cpu_s": time.process_time(), "mib": int(shared.split()[1]) / 1024}), flush=True)
    sys.stdin.read()


def environment() -> dict[str, str]:
    paths = [str(HERE), *(os.path.abspath(p) for p in sys.path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def told(out: BinaryIO, started: float) -> dict[str, float]:
    found: dict[str, float] = json.loads(out.readline())
    return found | {"seconds": time.perf_counter() - started}


@contextlib.contextmanager
def alone() -> Iterator[Callable[[], dict[str, float]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> dict[str, float]:
        command = [sys.executable, "-c", "import sampler_start; sampler_start.begin()"]
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        return told(process.stdout, started)

    yield start
    for process in processes:
        process.communicate()


@contextlib.contextmanager
def forked() -> Iterator[Callable[[], dict[str, float]]]:
    server = forkserver("sampler_start:begin", environment())
    children = []

    def start() -> dict[str, float]:
        started = time.perf_counter()
        children.append(server.fork())
        return told(children[-1].stdout, started)

    yield start
    for child in children:
        child.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sides: dict[str, list[dict[str, float]]] = {"alone": [], "forked, the first": [], "forked": []}
    for _ in range(options.repeats):
        with alone() as start:
            sides["alone"] += [start() for _ in range(SAMPLERS)]
        with forked() as start:
            sides["forked, the first"].append(start())
            sides["forked"] += [start() for _ in range(SAMPLERS)]
    table: dict[str, Any] = {"machine": machine("cpu"), "samplers": SAMPLERS, "repeats": options.repeats}
    for side, rows in sides.items():
        table[side] = {key: summary([row[key] for row in rows]) for key in ("seconds", "cpu_s", "mib")}
    options.out.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table, indent=1))


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "min": ordered[0], "max": ordered[-1]}


if __name__ == "__main__":
    main()
