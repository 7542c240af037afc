"""Generation with a pretrained model: the embedded engine beside `generate`, vLLM on the CPU and llama.cpp.

    python benchmarks/llm_generation.py --model DIR --out benchmarks/results/llm_generation.json \\
        [--vllm-python .venv-scale/bin/python] [--gguf FILE] [--only equal-bfloat16-1 ...] [--processor-time]

Every side is a process of its own (benchmarks/llm_sides.py) at the same number of threads. In every repeat all sides
run the same prompts one after the other; a ratio is taken within a repeat, and reported as median, minimum and maximum.
Prompts are chats in the model's own template, and differ from repeat to repeat; siblings share theirs. Temperature 1,
no filter; every row has its number of new tokens (nothing else ends it). `generate` has no such number for each row: it
runs all rows to the longest. Winnow and vLLM report log-probabilities, the others do not. llama.cpp takes a GGUF file.

Shares of the machine are Winnow's, of what is measured beside it: a matrix product of 2048 x 2048 in the same type, and
reading 512 MiB. Prefill: operations of the layers on the prompts' tokens. Decoding: bytes of weights and of filled
columns of the KV cache that its steps must read, and operations of all tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from machine import machine, matmul_rate
from transformers import AutoConfig, AutoTokenizer

SIBLINGS = 8
PROMPTS = {"equal": 8, "tail": 8, "one": 1}
"""`equal`: 32 new tokens each. `tail`: a log-normal's quantiles, median 24, mean 64, at most 256. `one`: a single
group of 32 tokens each, for the share of memory bandwidth."""
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
    if work != "tail":
        return [32] * n
    ordered = [max(1, min(256, round(24 * math.exp(1.9 * NormalDist().inv_cdf((i + 0.5) / n))))) for i in range(n)]
    return [ordered[i * 389 % n] for i in range(n)]


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


def machine_limits(dtype: str, threads: int, clock: str) -> dict[str, float]:
    """Operations a second of a matrix product, and bytes a second read from memory; the best of several."""
    torch.set_num_threads(threads)
    now = time.process_time if clock == "processor" else time.perf_counter
    big, times = torch.zeros(1 << 27), []
    for _ in range(8):
        started = now()
        big.sum()
        times.append(now() - started)
    return {"flops": matmul_rate(getattr(torch, dtype), now), "bytes": 4 * big.numel() / min(times)}


def shares(config: Any, work: Json, found: Json, limits: dict[str, float], dtype: str) -> Json:
    """Of Winnow's run; the first step is the prefill and one token a row."""
    size = getattr(torch, dtype).itemsize
    head = config.vocab_size * config.hidden_size
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (qkv + config.num_attention_heads * config.head_dim + 3 * config.intermediate_size)
    layers, column = config.num_hidden_layers * layer, 2 * config.num_hidden_layers * config.num_key_value_heads
    new = work["lengths"]
    prompts = [len(work["prompts"][i // work["siblings"]]) for i in range(len(new))]
    read = sum((n - 1) * p + n * (n - 1) // 2 for n, p in zip(new, prompts, strict=True)) * column * config.head_dim
    steps, tokens = max(new) - 1, sum(new) - len(new)
    seconds = found["seconds"] - found["first_step"]
    prompt_tokens = sum(map(len, work["prompts"]))
    return {
        "prefill_flops": 2 * layers * prompt_tokens / found["first_step"] / limits["flops"],
        "decode_flops": 2 * (layers + head) * tokens / seconds / limits["flops"],
        "decode_bytes": (steps * (layers + head) + read) * size / seconds / limits["bytes"],
        "sampling": found["sampling"] / found["seconds"],
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(options: argparse.Namespace, tokenizer: Any, cell: Cell) -> Iterator[Json]:
    """The cell after each repeat."""
    work, dtype, threads = cell
    sides = {"winnow": (sys.executable, options.model), "generate": (sys.executable, options.model)}
    if options.vllm_python:
        sides["vllm-cpu"] = (options.vllm_python, options.model)
    if options.gguf:
        sides["llama.cpp"] = (sys.executable, options.gguf)
    slots, clock = PROMPTS[work] * SIBLINGS, "processor" if options.processor_time else "wall"
    limits = machine_limits(dtype, threads, clock)
    running = [Process(side, where, dtype, threads, slots, clock) for side, where in sides.items()]
    config = AutoConfig.from_pretrained(options.model)
    found: dict[str, list[Json]] = {process.side: [] for process in running}
    parts: dict[str, list[Json]] = {"all": [], "one_group": []}
    try:
        for process in running:  # compiles, allocates, and leaves nothing in a prefix cache but the system prompt
            process.run(make_work(tokenizer, "one", -1))
        for repeat in range(options.repeats):
            load, alone = make_work(tokenizer, work, repeat), make_work(tokenizer, "one", repeat)
            for process in running:
                found[process.side].append(process.run(load))
            parts["all"].append(shares(config, load, found["winnow"][-1], limits, dtype))
            parts["one_group"].append(shares(config, alone, running[0].run(alone), limits, dtype))
            yield {"clock": clock, "rows": slots, "limits": limits} | summary(load, found, parts)
    finally:
        for process in running:
            process.close()


def summary(load: Json, found: dict[str, list[Json]], parts: dict[str, list[Json]]) -> Json:
    seconds = {side: [run["seconds"] for run in runs] for side, runs in found.items()}
    ours, tokens = seconds["winnow"], sum(load["lengths"])
    return {
        "new_tokens": tokens,
        "prompt_tokens": sum(map(len, load["prompts"])),
        "seconds": seconds,
        "tokens_per_second": {side: tokens / statistics.median(s) for side, s in seconds.items()},
        "times_as_fast_as": {
            side: spread([theirs / own for theirs, own in zip(s, ours, strict=True)])
            for side, s in seconds.items()
            if side != "winnow"
        },
        "peak_bytes": {side: runs[-1]["peak_bytes"] for side, runs in found.items()},
        "share_of_machine": {
            which: {k: statistics.median(p[k] for p in some) for k in some[0]} for which, some in parts.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["-".join(map(str, cell)) for cell in CELLS]
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu")
    parser.add_argument("--gguf", help="GGUF file of the model, for llama.cpp")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="the others stay as they were measured")
    parser.add_argument(
        "--processor-time", action="store_true", help="seconds of the processor, not the clock: on a busy machine"
    )
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    result: Json = json.loads(options.out.read_text()) if options.out.exists() else {"cells": {}}
    result |= {"what": __doc__, "machine": machine("cpu")}
    for name, cell in zip(names, CELLS, strict=True):
        if name not in options.only:
            continue
        for found in measure(options, tokenizer, cell):
            result["cells"][name] = found
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(name, json.dumps({k: found[k] for k in ("tokens_per_second", "times_as_fast_as")}), flush=True)


if __name__ == "__main__":
    main()
