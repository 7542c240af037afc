"""Decode steps and updates on one GPU, and what its memory and its matrix units allow. Three minutes with a card.

    python benchmarks/gpu_engine.py --out build/gpu_engine.json
    python benchmarks/gpu_engine.py --device cpu --out build/gpu_engine_cpu.json      # small, to try the script

`decode` and `fused kernels` are the same steps without and with the engine's Triton kernels, which no card has run yet.
Every part writes its figures as it ends; one that fails leaves its error, and the next one begins. Needs PyTorch,
transformers and this checkout on PYTHONPATH, no network. A model of Qwen3-0.6B's shapes with random weights, bfloat16.
transformers' continuous batching is measured, too, and vLLM where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import continuous_run, make_model, make_tokenizer
from harness import machine, write_json

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, ModelReference, Request, SamplingParams, VllmOptions
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.rows import Row
from winnow.methods.loss import LossConfig
from winnow.types import Rollout

Figures = dict[str, Any]
SIBLINGS = 8
DECODES = {"cuda": [(256, 128, 32), (128, 352, 64), (16, 128, 32)], "cpu": [(16, 8, 8)]}
"""Rows, tokens of the prompt, tokens that are sampled."""
UPDATES = {"cuda": [64, 256], "cpu": [8]}
"""Rows of 256 prompt tokens (8 on a CPU) and as many sampled ones."""


@dataclass
class Card:
    """The device, and what all parts need of it."""

    device: str

    @property
    def size(self) -> str:
        return "0.6B" if self.device == "cuda" else "0.7M"

    @cached_property
    def model(self) -> Any:
        return make_model(self.size, self.device)

    @cached_property
    def bytes_per_s(self) -> float:
        """Bytes read and written a second by a copy of 2 GiB (32 MiB on a CPU)."""
        source = torch.empty((2 << 30) if self.device == "cuda" else (32 << 20), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * len(source) / self.seconds(lambda: target.copy_(source), 5)

    @cached_property
    def products_per_s(self) -> float:
        """Floating-point operations a second of a large product in bfloat16."""
        n = 8192 if self.device == "cuda" else 512
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in "ab")
        return 2 * n**3 / self.seconds(lambda: a @ b, 10)

    def seconds(self, work: Callable[[], Any], repeats: int = 1) -> float:
        """Seconds of one call; the first does not count if there are several."""
        if repeats > 1:
            work()
        self.wait()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - started) / repeats

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def kernels(self, work: Callable[[], Any]) -> int | None:
        """Kernels that a call starts; None on a CPU."""
        if self.device != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            work()
            self.wait()
        return sum(event.count for event in found.key_averages())


def requests(rows: int, prompt: int, sampled: int, vocabulary: int) -> list[Request]:
    draws = np.random.default_rng(0)
    prompts = [tuple(draws.integers(1, vocabulary, prompt).tolist()) for _ in range(-(-rows // SIBLINGS))]
    return [Request(i, prompts[i // SIBLINGS], SamplingParams(sampled), noise_key(0, i)) for i in range(rows)]


def decode_of(card: Card, engine: Any, shape: tuple[int, int, int]) -> Figures:
    """Tokens a second of the decode steps alone: the first steps, with prefill and graphs, do not count."""
    rows, prompt, sampled = shape
    for warm in (True, False):
        engine.submit(requests(rows, prompt, sampled, min(card.model.config.vocab_size, 150)))
        for _ in range(4):
            engine.step()
        kernels = None if warm else card.kernels(engine.step)
        started, steps = time.perf_counter(), 0
        while engine.pending:
            engine.step()
            steps += 1
        card.wait()
        seconds = time.perf_counter() - started
    config = card.model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 2
    read = 2 * card.model.num_parameters() + rows * (prompt + sampled // 2) * cache
    limit = rows * card.bytes_per_s / read
    return {
        "rows": rows,
        "context": [prompt, prompt + sampled],
        "step_ms": 1e3 * seconds / steps,
        "tokens_per_s": rows * steps / seconds,
        "limit_tokens_per_s": limit,
        "kernels_per_step": kernels,
    }


def decode(card: Card, **options: Any) -> Figures:
    found = {}
    for shape in DECODES[card.device]:
        engine = LocalEngine(card.model, make_tokenizer(), slots=shape[0], dtype="bfloat16", **options)
        found["x".join(map(str, shape))] = decode_of(card, engine, shape)
        del engine
    return found


def fused_decode(card: Card) -> Figures:
    """`decode` by the Triton kernels, and how far 16 sequences of them agree with those of `decode`."""
    done = []
    for fused in (False, True):
        engine = LocalEngine(card.model, make_tokenizer(), slots=16, dtype="bfloat16", fused_kernels=fused)
        engine.submit(requests(16, 80, 16, min(card.model.config.vocab_size, 150)))
        events = [event for _ in range(16) for event in engine.step() if isinstance(event, Finished)]
        done.append({event.id: event for event in events})
    pairs = [(plain, done[1][id_]) for id_, plain in done[0].items()]
    same = [(a, b) for a, b in pairs if np.array_equal(a.token_ids, b.token_ids)]
    gap = max((float(np.abs(a.logp - b.logp).max()) for a, b in same), default=None)
    return {"same_sequences": len(same) / len(pairs), "largest_logp_gap": gap} | decode(card, fused_kernels=True)


def vllm(card: Card) -> Figures:
    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed"}
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        card.model.save_pretrained(directory)
        for shape in DECODES[card.device]:
            options = VllmOptions(slots=shape[0], dtype="bfloat16", max_length=shape[1] + shape[2] + 8)
            reference = ModelReference(directory, torch.device(card.device))
            engine = options.for_run(shape[1] + shape[2] + 8, 0.4, sleep=False).build(reference, make_tokenizer())
            found["x".join(map(str, shape))] = decode_of(card, engine, shape)
            engine.close()  # type: ignore[attr-defined]
    return found


def continuous_batching(card: Card) -> Figures:
    rows, prompt, sampled = DECODES[card.device][0]
    run = continuous_run(card.model, requests(rows, prompt, sampled, 150))
    run()
    return {"tokens_per_s": rows * sampled / run(), "with": "prefill"}


def update(card: Card, *, compiled: bool = False) -> Figures:
    """Seconds of the third of three updates, and the share of the matrix rate: 6 operations a weight and token.

    `compiled`: with `torch_compile`, which changes the model's layers and so comes last. The learning rate is 0, so
    that gradient norms of both can be compared.
    """
    found, vocabulary = {}, card.model.config.vocab_size
    tokens = 256 if card.device == "cuda" else 8
    options = LearnerOptions(compute_dtype=torch.bfloat16, tokens_per_microbatch=16_384, torch_compile=compiled)
    learner = LocalLearner(card.model.float(), TokenDistribution(vocabulary), options)
    for rows in UPDATES[card.device]:
        batch, draws = [], np.random.default_rng(1)
        for request in requests(rows, tokens, 1, 150):
            ids = draws.integers(1, 150, tokens)
            every, logp = np.ones(tokens, bool), np.full(tokens, -1.0, np.float32)
            rollout = Rollout(0, request.prompt_ids, ids, every, logp, np.zeros(tokens, np.int32))
            batch.append(Row(rollout, draws.choice([-1.0, 1.0]), 1 / (rows * tokens)))

        def work(batch: list[Row] = batch) -> float:
            learner.accumulate(batch, LossConfig(), 0)
            return learner.apply(0.0)

        if card.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [card.seconds(work) for _ in range(3)]
        computed = rows * tokens + rows // SIBLINGS * tokens  # siblings' prompts once
        operations = 6 * card.model.num_parameters() * computed
        found[str(rows)] = {
            "seconds": seconds[-1],
            "first_seconds": seconds[0],
            "computed_tokens_per_s": computed / seconds[-1],
            "share_of_matrix_rate": operations / seconds[-1] / card.products_per_s,
            "grad_norm": work(),
            "kernels": card.kernels(work),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if card.device == "cuda" else None,
        }
    return found


PARTS: dict[str, Callable[[Card], Figures]] = {
    "card": lambda card: {"bytes_per_s": card.bytes_per_s, "products_per_s": card.products_per_s},
    "decode": decode,
    "fused kernels": fused_decode,
    "continuous batching": continuous_batching,
    "update": update,
    "vLLM": vllm,
    "update with torch_compile": partial(update, compiled=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    card = Card(options.device)
    report: Figures = {"what": __doc__, "machine": machine(card.device), "model": card.size, "parts": {}}
    for name in options.only:
        started = time.perf_counter()
        try:
            figures = PARTS[name](card)
        except Exception as error:  # the other parts remain useful
            figures = {"error": f"{type(error).__name__}: {error}"}
        report["parts"][name] = figures | {"part_s": time.perf_counter() - started}
        write_json(options.out, report)
        print(f"{name}: {report['parts'][name]}", flush=True)


if __name__ == "__main__":
    main()
