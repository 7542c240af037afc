"""Generation with a pretrained model: the embedded engine, `generate`, and vLLM on the CPU.

    python benchmarks/bench.py llm_generation --model DIR --out benchmarks/results/llm_generation.json \\
        [--vllm-python .venv-scale/bin/python] [--only equal-bfloat16-1 ...] [--processor-time]

Every side is a process (benchmarks/llm_sides.py) with the same number of threads. In every repeat all sides run the
same prompts one after the other; a ratio is taken within a repeat, and reported as median, minimum and maximum.
Prompts are chats in the model's own template, and differ from repeat to repeat; siblings share theirs. Temperature 1,
no filter; every row has its number of new tokens (nothing else ends it). `generate` has no such number for each row: it
runs all rows to the longest. Winnow and vLLM report log-probabilities, `generate` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from engine import log_normal
from harness import in_turn, machine, read_json, spread, write_json
from transformers import AutoTokenizer

SIBLINGS = 8
PROMPTS = {"equal": 8, "tail": 8, "one": 1}
"""`equal`: 32 new tokens each. `tail`: a log-normal's quantiles, median 24, mean 64, at most 256. `one`: a single
group of 32 tokens each, to warm up."""
CELLS = [
    (work, dtype, threads) for dtype in ("float32", "bfloat16") for threads in (1, 2) for work in ("equal", "tail")
]
QUESTIONS = (
    "What is {a} * {b}? Answer with the number only.",
    "What is {a} + {b} + {c}? Think step by step, then give the answer on the last line.",
    "A farmer has {a} boxes with {b} apples each and gives away {c} apples. How many apples are left? Show your work.",
    "Write the number {a} in words, then say whether it is larger than {b}.",
)
Json = dict[str, Any]
Cell = tuple[str, str, int]
"""Workload, dtype, threads."""


def lengths(work: str) -> list[int]:
    n = PROMPTS[work] * SIBLINGS
    return log_normal(n) if work == "tail" else [32] * n


def make_work(tokenizer: Any, work: str, repeat: int) -> Json:
    prompts = []
    for i in range(PROMPTS[work]):
        question = QUESTIONS[i % len(QUESTIONS)].format(a=12 + 7 * i + 131 * repeat, b=5 + 3 * i, c=11 + i + repeat)
        chat = [{"role": "user", "content": question}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    return {"prompts": prompts, "siblings": SIBLINGS, "lengths": lengths(work)}


class Process:
    """A side that waits for workloads."""

    def __init__(self, side: str, where: tuple[str, str], dtype: str, threads: int, slots: int, clock: str) -> None:
        python, model = where
        ours = {
            "CLOCK": clock,
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [python, str(Path(__file__).with_name("llm_sides.py")), side, model, dtype, str(slots)]
        self.side = side
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ours}
        )

    def run(self, work: Json) -> Json:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.side} ended with exit code {self._process.wait()}; its messages are above")
        found: Json = json.loads(answer)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(options: argparse.Namespace, tokenizer: Any, cell: Cell) -> Iterator[Json]:
    """The cell after each repeat."""
    work, dtype, threads = cell
    pythons = {"winnow": sys.executable, "generate": sys.executable}
    if options.vllm_python:
        pythons["vllm-cpu"] = options.vllm_python
    slots, clock = PROMPTS[work] * SIBLINGS, "processor" if options.processor_time else "wall"
    sides = {
        side: Process(side, (python, options.model), dtype, threads, slots, clock) for side, python in pythons.items()
    }
    rounds: list[dict[str, Json]] = []
    try:
        for side in sides.values():  # compiles, allocates, and leaves nothing in a prefix cache but the system prompt
            side.run(make_work(tokenizer, "one", -1))
        for repeat in range(options.repeats):
            load = make_work(tokenizer, work, repeat)
            rounds += in_turn({name: partial(side.run, load) for name, side in sides.items()}, 1)
            yield {"clock": clock, "rows": slots} | summary(load, rounds)
    finally:
        for side in sides.values():
            side.close()


def summary(load: Json, rounds: list[dict[str, Json]]) -> Json:
    seconds = {side: [found[side]["seconds"] for found in rounds] for side in rounds[0]}
    tokens = sum(load["lengths"])
    return {
        "new_tokens": tokens,
        "prompt_tokens": sum(map(len, load["prompts"])),
        "seconds": seconds,
        "tokens_per_second": {side: tokens / statistics.median(s) for side, s in seconds.items()},
        "times_as_fast_as": {
            side: spread(found[side]["seconds"] / found["winnow"]["seconds"] for found in rounds)
            for side in seconds
            if side != "winnow"
        },
        "peak_bytes": {side: found["peak_bytes"] for side, found in rounds[-1].items()},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    names = ["-".join(map(str, cell)) for cell in CELLS]
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="the others stay as they were measured")
    parser.add_argument(
        "--processor-time", action="store_true", help="seconds of the processor, not the clock: on a busy machine"
    )


def run(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    result: Json = {"cells": {}} | read_json(options.out) | {"what": __doc__, "machine": machine("cpu")}
    for cell in CELLS:
        name = "-".join(map(str, cell))
        if name not in options.only:
            continue
        for found in measure(options, tokenizer, cell):
            result["cells"][name] = found
            write_json(options.out, result)
            print(name, json.dumps({k: found[k] for k in ("tokens_per_second", "times_as_fast_as")}), flush=True)
