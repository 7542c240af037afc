"""What many rows of data take.

python benchmarks/bench.py rows --out benchmarks/results/rows.json
python benchmarks/bench.py million_prompts --out benchmarks/results/million_prompts.json

`rows`: processor seconds and memory before the first step, by rows and kind of file. `million_prompts`: how long
selectors take to choose a batch among a million prompts, all visited before.
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

import numpy as np
from harness import in_a_process, machine, spread, write_json

from winnow.base.machine import resident_mib
from winnow.env.dataset import DatasetConfig
from winnow.methods.select import SELECTORS
from winnow.methods.select.greso import Greso
from winnow.types import Prompt

SIZES = (100_000, 1_000_000)
FORMS = ("jsonl", "parquet", "python")
READ = 10_000
"""Prompts read at random places."""
PROMPTS, BATCH, REPEATS = 1_000_000, 256, 20


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


def visited(name: str, prompts: list[Prompt]) -> Any:
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
    return selector


def milliseconds(selector: Any) -> float:
    started = time.perf_counter()
    selector.select(BATCH)
    return 1e3 * (time.perf_counter() - started)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.start:
        form, path, n = options.start
        print(json.dumps(start(form, path, int(n))))
        return
    table: dict[str, Any] = {"machine": machine("cpu", "pyarrow")}
    if options.benchmark == "million_prompts":
        prompts = [Prompt(f"p{i}", i, text="") for i in range(PROMPTS)]
        selectors = {name: visited(name, prompts) for name in ("uniform", "greso", "bayes", "thompson")}
        table["milliseconds"] = {
            name: spread(milliseconds(selector) for _ in range(REPEATS)) for name, selector in selectors.items()
        }
        print(json.dumps(table["milliseconds"]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            table["starts"] = [measured(form, n, Path(folder)) for n in SIZES for form in FORMS]
        print("\n".join(map(json.dumps, table["starts"])))
    write_json(options.out, table)
