"""Where the time of prefill and decoding with a pretrained model goes, by operation.

    OMP_NUM_THREADS=1 python benchmarks/llm_profile.py --model DIR --out FILE [--dtype bfloat16]

The workload `equal` of benchmarks/llm_generation.py: 8 prompts, 64 rows of 32 new tokens. A share is an operation's own
time of all time in PyTorch's operations; the rate of products is that of the weights' matrices on their tokens (padded
ones too), over that of a large product.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from llm_generation import SIBLINGS, make_work
from llm_sides import load, rows
from machine import machine, matmul_rate
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer

from winnow.base.noise import noise_key
from winnow.base.processor import bfloat16_units
from winnow.engine import LocalEngine, Request, SamplingParams

KINDS = {
    "products with weights": ("linear_pointwise", "addmm", "aten::mm"),
    "attention": ("attention", "bmm"),
    "copies and changes of type": ("copy_", "aten::cat", "clone", "fill_", "zero_"),
    "keys and values to their rows": ("index_copy", "index_put"),
    "norms, rotary embeddings, activations, sums": ("norm", "mul", "silu", "add", "rsqrt", "mean", "pow"),
}
"""Kind -> parts of names of operations, the first that matches counts; the rest is drawing tokens and bookkeeping."""


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "the rest")


def shares(events: Any, flops: float, rate: float) -> dict[str, Any]:
    """Of a profile in which the weights' matrices did `flops` operations."""
    spent: Counter[str] = Counter()
    for event in events:
        spent[kind_of(event.key)] += event.self_cpu_time_total * 1e-6
    total = sum(spent.values())
    return {
        "seconds": total,
        "shares": {kind: seconds / total for kind, seconds in spent.most_common()},
        "rate_of_products": flops / spent["products with weights"] / rate,
    }


def matrix_flops(model: Any, layer_tokens: int, head_tokens: int) -> float:
    head = model.config.vocab_size * model.config.hidden_size
    tied = model.config.tie_word_embeddings
    layers = sum(p.numel() for p in model.parameters() if p.dim() == 2) - (head if tied else 2 * head)
    return 2.0 * (layers * layer_tokens + head * head_tokens)


def measure(model_path: str, dtype: str) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    work = make_work(tokenizer, "equal", 0)
    tokenizer.eos_token = tokenizer.chat_template = None
    model = load(model_path, dtype)
    engine = LocalEngine(model, tokenizer, slots=len(work["lengths"]))
    found: dict[str, Any] = {}
    prompts, n = len(work["prompts"]), len(work["lengths"])
    for turn in range(3):  # the last one counts: the first warms up
        rate = matmul_rate(getattr(torch, dtype), time.thread_time)
        engine.submit(
            Request(turn * n + i, tuple(ids), SamplingParams(length), noise_key(turn, i))
            for i, (_, ids, length) in enumerate(rows(work))
        )
        padded = prompts * max(map(len, work["prompts"]))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            engine.step()
        found["prefill and the first token"] = shares(seen.key_averages(), matrix_flops(model, padded, prompts), rate)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            steps = 0
            while engine.pending:
                engine.step()
                steps += 1
        found["decoding"] = shares(seen.key_averages(), matrix_flops(model, steps * n, steps * n), rate)
    return {"flops": rate, "siblings": SIBLINGS, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of SmolLM2-135M-Instruct")
    fast = "bfloat16" if bfloat16_units() else "float32"
    parser.add_argument("--dtype", default=fast, choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    said = {"machine": machine("cpu"), "threads": torch.get_num_threads(), "dtype": options.dtype}
    said |= measure(options.model, options.dtype)
    options.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
