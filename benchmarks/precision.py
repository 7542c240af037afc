"""float32 beside bfloat16, on one thread and on two: seconds of generation and of an update, models of several sizes.

    python benchmarks/precision.py --out benchmarks/results/precision.json [--model DIRECTORY] [--only demo ...]

Within a repeat every setting runs once, and ratios are taken there, so that a busy machine disturbs all alike; those
of CPU seconds tell what a type costs where others want the cores, and those of wall-clock what a thread gains. All
settings generate the same number of tokens (ends of sequences are taken from the model) and update on the same rows.
bfloat16 is what `dtype: auto` means by it: the engine's weights in bfloat16, and the update under autocast.
`nats_apart` is the mean difference of both sides' log-probabilities of sampled tokens. `--model`: a pretrained one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from machine import machine

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Request, SamplingParams
from winnow.learner.agreement import compare
from winnow.learner.batch import Row
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.methods.loss import LossConfig
from winnow.study.warm_start import WarmStartConfig, small_model, word_tokenizer
from winnow.tasks.countdown import CountdownConfig
from winnow.types import Rollout

SIBLINGS = 8
DTYPES = ("float32", "bfloat16")
LOSS = LossConfig()


@dataclass(frozen=True)
class Case:
    """A model and the rollouts of a step."""

    groups: int
    prompt: int
    new: int
    """Tokens of each prompt and of each completion."""
    sizes: dict[str, int] | None = None
    """Of a Llama made here; None: the demo's model, or the pretrained one."""


def llama(hidden: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_layers": layers,
        "num_heads": hidden // 64,
    }


CASES = {
    "demo": Case(32, 12, 12),
    "2M": Case(8, 16, 24, llama(192, 4)),
    "5M": Case(4, 16, 24, llama(256, 6)),
    "10M": Case(4, 16, 24, llama(384, 6)),
    "23M": Case(4, 16, 24, llama(512, 8)),
    "pretrained": Case(2, 16, 12),
}


def model_of(case: Case, directory: Path | None) -> tuple[Any, Any]:
    """A float32 model and a tokenizer; no token ends a sequence."""
    torch.manual_seed(0)
    if directory is not None:
        model = hf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = hf.AutoTokenizer.from_pretrained(directory)
    else:
        words = CountdownConfig().build().vocabulary() if case.sizes is None else [f"w{i}" for i in range(2000)]
        tokenizer = word_tokenizer(words, 512)
        model = small_model(tokenizer, WarmStartConfig(**(case.sizes or {})))
    for source in (model.config, model.generation_config, tokenizer):
        source.eos_token_id = None
    return model.eval(), tokenizer


def requests_of(case: Case, vocabulary: int) -> list[Request]:
    ids = np.random.default_rng(0).integers(0, vocabulary, (case.groups, case.prompt)).tolist()
    params = SamplingParams(case.new)
    return [Request(i, tuple(ids[i // SIBLINGS]), params, noise_key(0, i)) for i in range(case.groups * SIBLINGS)]


def generate(engine: LocalEngine, requests: Sequence[Request]) -> list[Finished]:
    ended = []
    engine.submit(requests)
    while engine.pending:
        ended += [event for event in engine.step() if isinstance(event, Finished)]
    return sorted(ended, key=lambda event: event.id)


def rows_of(requests: Sequence[Request], ended: Sequence[Finished]) -> list[Row]:
    rows = []
    for request, event in zip(requests, ended, strict=True):
        n = len(event.token_ids)
        rollout = Rollout(
            request.id % SIBLINGS, request.prompt_ids, event.token_ids, np.ones(n, bool), event.logp, event.versions
        )
        rows.append(Row(rollout, 1.0 if request.id % 2 else -1.0, 1 / (n * len(requests))))
    return rows


def update(learner: LocalLearner, rows: Sequence[Row]) -> None:
    learner.accumulate(rows, LOSS)
    learner.apply(0.0)  # the same weights for every setting


def timed(part: str, run: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Seconds by wall clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(*arguments)
    return {part: time.perf_counter() - wall, f"{part} cpu": time.process_time() - cpu}


def measure(case: Case, directory: Path | None, threads: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """What is known after each repeat."""
    torch.set_num_threads(threads[0])
    model, tokenizer = model_of(case, directory)
    engines = {dtype: LocalEngine(model, tokenizer, dtype=dtype) for dtype in DTYPES}
    learners = {
        dtype: LocalLearner(
            copy.deepcopy(model),
            TokenDistribution(engines[dtype].sequences.facts.vocab_size),
            LearnerOptions(compute_dtype=getattr(torch, dtype)),
        )
        for dtype in DTYPES
    }
    requests = requests_of(case, engines["float32"].sequences.facts.vocab_size)
    rows = {dtype: rows_of(requests, generate(engines[dtype], requests)) for dtype in DTYPES}
    apart = {
        f"engine {a}, update {b}": compare([row.rollout for row in rows[a]], learners[b]).mean
        for a in DTYPES
        for b in DTYPES
    }
    times: dict[str, dict[str, list[float]]] = {}
    for repeat in range(repeats + 1):  # the first warms up
        for n in threads:
            torch.set_num_threads(n)
            for dtype in DTYPES:
                found = times.setdefault(f"{dtype}, {n}", {})
                taken = timed("generation", generate, engines[dtype], requests)
                taken |= timed("update", update, learners[dtype], rows["float32"])
                for part, seconds in taken.items() if repeat else ():
                    found.setdefault(part, []).append(seconds)
        if repeat:
            yield {
                "parameters": model.num_parameters(),
                "rollouts": len(requests),
                "prompt_tokens": case.prompt,
                "new_tokens": case.new,
                "repeats": repeat,
                "seconds": times,
                "times_faster": ratios(times, threads),
                "nats_apart": apart,
            }


def ratios(times: dict[str, dict[str, list[float]]], threads: Sequence[int]) -> dict[str, Any]:
    """Times faster than what each name ends with, within a repeat."""
    first = threads[0]
    pairs = {f"bfloat16 than float32, {n} thread{'s'[: n > 1]}": (f"float32, {n}", f"bfloat16, {n}") for n in threads}
    pairs |= {f"{d}, {n} threads than {first}": (f"{d}, {first}", f"{d}, {n}") for d in DTYPES for n in threads[1:]}
    return {
        name: {
            part: spread([a / b for a, b in zip(times[slow][part], times[fast][part], strict=True)])
            for part in times[slow]
        }
        for name, (slow, fast) in pairs.items()
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    hf.logging.set_verbosity_error()
    said = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"models": {}}
    said |= {"what": __doc__, "machine": machine("cpu")}
    for name in options.only:
        if name == "pretrained" and options.model is None:
            continue
        directory = options.model if name == "pretrained" else None
        for found in measure(CASES[name], directory, options.threads, options.repeats):
            said["models"][name] = found
            options.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        print(name, found["parameters"], flush=True)
        for pair, parts in found["times_faster"].items():
            print("  ", pair, {k: {s: round(v, 2) for s, v in w.items()} for k, w in parts.items()}, flush=True)
        print("  ", {k: f"{v:.2g}" for k, v in found["nats_apart"].items()}, flush=True)


if __name__ == "__main__":
    main()
