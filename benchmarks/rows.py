"""What a data set of many rows takes before its first step: processor seconds and memory, by rows and kind of file.

python benchmarks/bench.py rows --out benchmarks/results/rows.json
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import in_a_process, machine, write_json

from winnow.base.machine import resident_mib
from winnow.env.dataset import DatasetConfig
from winnow.methods.select.greso import Greso

SIZES = (100_000, 1_000_000)
FORMS = ("jsonl", "parquet", "python")
READ = 10_000
"""Prompts read at random places."""


def rows(n: int) -> Iterator[dict[str, Any]]:
    """A question, its solution of some 200 characters, and two short columns."""
    rng = random.Random(0)
    for i in range(n):
        a, b = rng.randrange(10_000), rng.randrange(10_000)
        question = f"Question {i}: a shop has {a} apples and gets {b} more. How many apples has it then?"
        solution = f"It had {a} and got {b}, and {a} + {b} = {a + b}. " * 4
        yield {"prompt": question, "solution": solution, "answer": a + b, "level": i % 5}


def write(path: Path, n: int) -> None:
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(n))
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows(n))), path)


def start(form: str, path: str, n: int) -> dict[str, float]:
    """One start of a run, as far as rows go, in this process."""
    began, found = resident_mib(), {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = step()
        found[f"{name}_s"] = time.process_time() - started
        return result

    config = DatasetConfig(path=path)
    task = timed("build", lambda: config.with_rows(rows(n)) if form == "python" else config.build())
    selector = timed("selector", lambda: Greso().build(task.train, seed=0))
    timed("select_256", lambda: selector.select(256))
    found["state_bytes"] = len(json.dumps(timed("state", selector.state_dict)))
    timed("fingerprint", task.fingerprint)
    timed("fingerprint_again", task.fingerprint)
    places = random.Random(1).choices(range(n), k=READ)
    timed("read", lambda: [task.train[i].id for i in places])
    found["read_us"] = 1e6 * found.pop("read_s") / READ
    found["resident_mib"] = resident_mib() - began
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return found | {"peak_mib": int(peak.split()[1]) / 1024 - began}


def measured(form: str, n: int, folder: Path) -> dict[str, Any]:
    path = folder / f"{n}.{form}"
    if form != "python" and not path.exists():
        write(path, n)
    size = path.stat().st_size / 2**20 if form != "python" else 0.0
    return {"form": form, "rows": n, "file_mib": size} | in_a_process("rows", "--start", form, str(path), str(n))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.start:
        form, path, n = options.start
        print(json.dumps(start(form, path, int(n))))
        return
    table: dict[str, Any] = {"machine": machine("cpu", "pyarrow"), "starts": []}
    with tempfile.TemporaryDirectory() as folder:
        for n in options.sizes:
            for form in FORMS:
                table["starts"].append(measured(form, n, Path(folder)))
                print(json.dumps(table["starts"][-1]), flush=True)
    write_json(options.out, table)
