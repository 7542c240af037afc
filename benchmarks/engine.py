"""The embedded engine against `transformers.generate` and transformers' continuous batching, side by side in one run.

    python benchmarks/engine.py --out benchmarks/results/engine.json [--quick] [--device cuda] [--only 0.7M-short ...]

Every repeat runs all sides one after the other; ratios are taken within a repeat and reported as median, minimum and
maximum, so that a busy machine disturbs all sides alike. Lengths are forced (random models have no length law of
their own): every request has its own max_tokens. `generate` has no per-row limit: it runs all rows, in one batch, to
the longest. Prompts, model, sampling (temperature 1, no filter) and useful tokens are the same on all sides. Each side
runs at the thread count (1 or all cores) that was faster for it on the short workload.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import transformers as hf
from machine import machine
from tokenizers import Tokenizer, models

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Request, SamplingParams

VOCAB, LONGEST_PROMPT, SIBLINGS = 170, 14, 8
SIZES = {
    "0.7M": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1}
    | {"intermediate_size": 384},
    "25M": {"hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"intermediate_size": 1408},
}
Run = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """`slots` is what the engine gets; the other sides get all requests at once."""

    rows: int
    long_tail: bool
    slots: int


WORKLOADS = {
    ("0.7M", "short"): Workload(256, False, 256),
    ("0.7M", "long-tail"): Workload(1024, True, 1024),
    ("25M", "short"): Workload(256, False, 256),
    ("25M", "long-tail"): Workload(128, True, 128),
}


def lengths(work: Workload) -> list[int]:
    """Short: 14 to 18. Long tail: a log-normal's quantiles with median 24, cut at 256 (mean 65), shuffled."""
    if not work.long_tail:
        return [14 + i % 5 for i in range(work.rows)]
    quantiles = [NormalDist().inv_cdf((i + 0.5) / work.rows) for i in range(work.rows)]
    ordered = [max(1, min(256, round(24 * math.exp(1.9 * z)))) for z in quantiles]
    return [ordered[i * 389 % work.rows] for i in range(work.rows)]


def make_model(size: str, device: str) -> Any:
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=VOCAB, max_position_embeddings=512, tie_word_embeddings=True, **SIZES[size],
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = hf.Qwen2ForCausalLM(config).eval().to(device)
    model.generation_config = hf.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    return model


def make_tokenizer() -> Any:
    vocab = {f"w{i}": i for i in range(VOCAB)}
    return hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")))


def make_requests(work: Workload) -> list[Request]:
    requests = []
    for i, length in enumerate(lengths(work)):
        group = i // SIBLINGS
        prompt = tuple(1 + (group * 31 + j * 7) % (VOCAB - 1) for j in range(LONGEST_PROMPT - group % 4))
        requests.append(Request(i, prompt, SamplingParams(length), noise_key(0, i)))
    return requests


# ---- the sides ---------------------------------------------------------------------------------------------------


def engine_run(model: Any, requests: list[Request], slots: int, dtype: str) -> Run:
    engine = LocalEngine(model, make_tokenizer(), slots=slots, dtype=dtype)

    def run() -> float:
        started, tokens = time.perf_counter(), 0
        engine.submit(requests)
        while engine.pending:
            tokens += sum(len(event.token_ids) for event in engine.step() if isinstance(event, Finished))
        assert tokens == sum(r.params.max_tokens for r in requests)
        return time.perf_counter() - started

    return run


def generate_run(model: Any, requests: list[Request], device: str) -> Run:
    longest = max(r.params.max_tokens for r in requests)
    padding = [LONGEST_PROMPT - len(r.prompt_ids) for r in requests]
    ids = torch.tensor([(0,) * n + r.prompt_ids for n, r in zip(padding, requests, strict=True)], device=device)
    mask = torch.tensor([(0,) * n + (1,) * (LONGEST_PROMPT - n) for n in padding], device=device)

    def run() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=longest)
        assert out.shape == (len(requests), LONGEST_PROMPT + longest)
        return time.perf_counter() - started

    return run


def continuous_run(model: Any, requests: list[Request]) -> Run:
    """transformers' own continuous batching; a copy of the model, because it changes the attention implementation."""
    model = copy.deepcopy(model)
    options = hf.ContinuousBatchingConfig(
        page_size=128, num_blocks=512, max_batch_tokens=256, return_logprobs=True, use_cuda_graph=False
    )

    def run() -> float:
        started = time.perf_counter()
        with model.continuous_batching_context_manager(
            continuous_batching_config=options, block=True, timeout=60
        ) as manager:
            for r in requests:
                manager.add_request(list(r.prompt_ids), str(r.id), r.params.max_tokens, eos_token_id=-1)
            tokens, done, deadline = 0, 0, started + 1800
            while done < len(requests):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    done, tokens = done + 1, tokens + len(output.generated_tokens)
                if time.perf_counter() > deadline or not manager.is_running():
                    raise RuntimeError(f"continuous batching stopped after {done} of {len(requests)} requests")
            seconds = time.perf_counter() - started
        assert tokens == sum(r.params.max_tokens for r in requests)
        return seconds

    return run


# ---- measuring ---------------------------------------------------------------------------------------------------


def machine_limits(device: str) -> dict[str, float]:
    """FLOP/s of an fp32 matrix product and bytes/s of a copy, the best of several, at all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    a, big = torch.randn(2048, 2048, device=device), torch.empty(1 << 26, device=device)
    into = torch.empty_like(big)

    def best(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(12):
            sync()
            started = time.perf_counter()
            call()
            sync()
            times.append(time.perf_counter() - started)
        return min(times)

    return {
        "gemm_flops": 2 * 2048**3 / best(lambda: a @ a),
        "copy_bytes": 2 * 4 * big.numel() / best(lambda: into.copy_(big)),
    }


def best_threads(run: Run) -> int:
    """Thread count at which the best of three warm runs is fastest."""
    times = {}
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        run()
        times[threads] = min(run() for _ in range(3))
    return min(times, key=times.__getitem__)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def shares(model: Any, work: Workload, requests: list[Request], seconds: dict[str, float], limits: Any) -> Any:
    """Of the machine's limits: operations on useful tokens, all operations done, bytes that had to be read."""
    config, weights = model.config, sum(p.numel() for p in model.parameters())
    new = [r.params.max_tokens for r in requests]
    column = (
        2
        * 4
        * config.num_hidden_layers
        * config.num_key_value_heads
        * (config.hidden_size // config.num_attention_heads)
    )
    read = sum(n * len(r.prompt_ids) + n * n // 2 for n, r in zip(new, requests, strict=True))
    padded = len(new) * (max(new) * LONGEST_PROMPT + max(new) ** 2 // 2)
    prompts = sum(len(r.prompt_ids) for r in requests[::SIBLINGS])
    done = {"engine": (sum(new) + prompts, read), "generate": (len(new) * (max(new) + LONGEST_PROMPT), padded)}
    out = {}
    for side, (tokens, columns) in done.items():
        steps = max(max(new), math.ceil(sum(new) / work.slots)) if side == "engine" else max(new)
        out[side] = {
            "flops_useful": 2 * weights * sum(new) / seconds[side] / limits["gemm_flops"],
            "flops_done": 2 * weights * tokens / seconds[side] / limits["gemm_flops"],
            "bytes": (steps * 4 * weights + columns * column) / seconds[side] / limits["copy_bytes"],
        }
    return out


def make_sides(size: str, name: str, device: str) -> dict[str, Run]:
    work, model = WORKLOADS[size, name], make_model(size, device)
    requests = make_requests(work)
    return {
        "engine": engine_run(model, requests, work.slots, "float32"),
        "engine_256_slots": engine_run(model, requests, 256, "float32"),
        "engine_bf16": engine_run(model, requests, work.slots, "bfloat16"),
        "generate": generate_run(model, requests, device),
        "continuous_batching": continuous_run(model, requests),
    }


@functools.cache
def choose_threads(size: str, device: str) -> dict[str, int]:
    return {side: best_threads(run) for side, run in make_sides(size, "short", device).items()}


def measure(size: str, name: str, device: str, repeats: int, limits: dict[str, float]) -> dict[str, Any]:
    work, model = WORKLOADS[size, name], make_model(size, device)
    requests = make_requests(work)
    tokens = sum(r.params.max_tokens for r in requests)
    threads, sides = choose_threads(size, device), make_sides(size, name, device)
    if work.slots <= 256:
        del sides["engine_256_slots"]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _, (side, run) in itertools.product(range(repeats), sides.items()):
        torch.set_num_threads(threads[side])
        seconds[side].append(run())
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": work.rows,
        "slots": work.slots,
        "new_tokens": {"total": tokens, "median": statistics.median(lengths(work)), "max": max(lengths(work))},
        "threads": threads,
        "seconds": seconds,
        "tokens_per_second": {side: tokens / median for side, median in medians.items()},
        "ratio_to_generate": {
            side: spread([g / t for g, t in zip(seconds["generate"], times, strict=True)])
            for side, times in seconds.items()
        },
        "share_of_machine": shares(model, work, requests, medians, limits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="two repeats, 0.7M only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="*", choices=["-".join(key) for key in WORKLOADS], default=None)
    args = parser.parse_args()
    hf.logging.set_verbosity_error()
    limits = machine_limits(args.device)
    result: dict[str, Any] = {
        "what": __doc__,
        "machine": machine(args.device),
        "limits": limits,
        "workloads": {},
    }
    if args.only and args.out.exists():  # the others stay as they were measured
        result["workloads"] = json.loads(args.out.read_text())["workloads"]
    for size, name in WORKLOADS:
        if (args.quick and size != "0.7M") or (args.only and f"{size}-{name}" not in args.only):
            continue
        for limit, value in machine_limits(args.device).items():  # again: a busy moment must not lower them
            limits[limit] = max(limits[limit], value)
        found = measure(size, name, args.device, 2 if args.quick else args.repeats, limits)
        result["workloads"][f"{size}-{name}"] = found
        ratios = ", ".join(f"{k} {v['median']:.2f}" for k, v in found["ratio_to_generate"].items())
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{size} {name}: times the speed of generate: {ratios}; threads {found['threads']}", flush=True)


if __name__ == "__main__":
    main()
