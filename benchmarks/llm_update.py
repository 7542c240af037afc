"""A GRPO step of a pretrained model of 135M parameters, Winnow's against TRL's `GRPOTrainer`: time and memory.

    python benchmarks/bench.py llm_update --model DIRECTORY --out benchmarks/results/llm_update.json

`DIRECTORY`: SmolLM2-135M-Instruct. Same prompts, group size, token budget, learning rate and loss; one update a step.
Every run is a process of its own, which begins with a step that is not counted, and sides alternate; peak memory is the
whole process's. Workloads: `equal`, completions of 64 tokens, one of four groups with equal rewards; `long_tail`, of up
to 256, where the model ends them, all groups with a signal. The update alone is the step less generation; its share of
the machine's matrix rate, the highest found in any run, counts multiply-adds that the loss needs: prompts once a group,
recomputed ones not at all, groups without a signal neither.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import in_a_process, in_turn, machine, matmul_rate, spread, write_json
from step import SIDES, Setting
from transformers import AutoConfig, AutoTokenizer
from workloads import Workload, chat_workload


def settings(dtype: str, threads: int) -> dict[str, Setting]:
    """Winnow as it chooses by itself; TRL with its own number of rows, and not recomputing layers, which it would do
    unless told not to, and which here only costs time."""
    return {
        "winnow": Setting(threads, "highest", tokens_per_microbatch="auto", dtype=dtype),
        "trl": Setting(threads, "highest", rows_per_microbatch=8, dtype=dtype),
    }


def one_run(model: Path, name: str, side: str, setting: Setting, steps: int) -> dict[str, Any]:
    """Of one side, in this process; call it in a fresh one."""
    with tempfile.TemporaryDirectory() as directory:
        long_tail = name == "long_tail"
        w = chat_workload(Path(directory), model, long_tail=long_tail, prompts_per_step=2 if long_tail else 4)
        torch.set_num_threads(setting.threads)
        rate = matmul_rate(getattr(torch, setting.dtype))
        run = SIDES[side](w, setting, steps, "cpu")
        assert long_tail or set(run.lengths) == {w.max_completion_length}, "a side has ended texts"
        needed = flops(w, run.lengths, run.zero_variance) / steps
    return run.summary() | {
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "update_flops_per_second": needed / run.phases["update"],
        "matmul_rate": rate,
    }


def flops(w: Workload, lengths: list[int], equal: list[bool]) -> float:
    """Of forward and backward passes over the groups with a signal."""
    c, tokenizer = AutoConfig.from_pretrained(w.model_dir), AutoTokenizer.from_pretrained(w.model_dir)
    prompt = len(tokenizer(w.prompts[0])["input_ids"])
    kv = c.num_key_value_heads * c.head_dim
    layer = 2 * c.hidden_size * (c.hidden_size + kv) + 3 * c.hidden_size * c.intermediate_size
    total = 0.0
    for number, same in enumerate(equal):
        if same:
            continue
        total += c.num_hidden_layers * prompt * (layer + c.hidden_size * prompt)
        for n in lengths[number * w.num_generations : (number + 1) * w.num_generations]:
            attention = 2 * c.hidden_size * (prompt + n / 2)
            total += n * (c.num_hidden_layers * (layer + attention) + c.hidden_size * c.vocab_size)
    return 6 * total


def one_process(model: Path, name: str, side: str, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--model", str(model), "--one", name, side, json.dumps(asdict(setting)), "--steps", str(options.steps)]
    arguments += ["--processor-time"] * options.processor_time
    return in_a_process("llm_update", *arguments)


def measure(name: str, of_side: dict[str, Setting], options: argparse.Namespace) -> dict[str, Any]:
    sides = {side: partial(one_process, options.model, name, side, of_side[side], options) for side in of_side}
    rounds = in_turn(sides, options.repeats)
    pairs = [(found["winnow"], found["trl"]) for found in rounds]
    rate = max(run["matmul_rate"] for pair in pairs for run in pair)
    return {
        "workload": name,
        "settings": {side: asdict(setting) for side, setting in of_side.items()},
        "runs": rounds,
        "step_times_faster": spread(
            statistics.mean(b["step_seconds"]) / statistics.mean(a["step_seconds"]) for a, b in pairs
        ),
        "tokens_per_second_ratio": spread(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs),
        "update_times_faster": spread(b["phases"]["update"] / a["phases"]["update"] for a, b in pairs),
        "peak_memory_ratio": spread(a["peak_mib"] / b["peak_mib"] for a, b in pairs),
        "update_share_of_matmul_rate": spread(a["update_flops_per_second"] / rate for a, _ in pairs),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--processor-time", action="store_true", help="of one thread, where other work is going on")
    parser.add_argument("--only", choices=["equal", "long_tail"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--one", nargs=3, metavar=("WORKLOAD", "SIDE", "SETTING"), help="used by the benchmark itself")


def run(options: argparse.Namespace) -> None:
    threads = 1 if options.processor_time else options.threads
    if options.one:
        if options.processor_time:
            time.perf_counter = time.monotonic = time.process_time  # which both sides tell the time by
        name, side, setting = options.one
        print(json.dumps(one_run(options.model, name, side, Setting(**json.loads(setting)), options.steps)))
        return
    results: dict[str, Any] = {
        "machine": machine("cpu", "trl", "accelerate"),
        "processor_time": options.processor_time,
        "runs": [],
    }
    for dtype in options.dtype:
        for name in [options.only] if options.only else ["equal", "long_tail"]:
            found = measure(name, settings(dtype, threads), options)
            results["runs"].append({"dtype": dtype} | found)
            write_json(options.out, results)
            print(name, dtype, "times TRL's speed:", found["step_times_faster"], flush=True)
