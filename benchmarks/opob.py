"""What the optimal baseline costs: an update with exact gradient norms (`advantage: opob`) against one without.

    python benchmarks/opob.py --out benchmarks/results/opob.json [--quick] [--device cuda]

An update is forward, backward and optimizer step over the same rollouts; generation is not in it. Sides: `ordinary`,
as Winnow does it, prompts computed once where that pays; `apart`, the same with prompts computed for every rollout,
which an update that needs the gradients of single rollouts cannot avoid; `opob`, which goes the way of `two_buffers`
where rollouts are long; `two_buffers`, a backward pass for each rollout and two sums of gradients (VCPO, algorithm 1);
`naive`, a pass for the norms alone and then an `apart`.
Sides alternate in one process. Peak memory is that of a process of its own, above what it had before the model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from transformers import Qwen2Config, Qwen2ForCausalLM

from winnow.learner.base import Stats
from winnow.learner.batch import Budget, MicroBatch, Pool, Row, micro_batches
from winnow.learner.local.learner import LearnerOptions, LocalLearner
from winnow.learner.local.logprob import TokenDistribution
from winnow.learner.local.optimal_baseline_update import RowByRow
from winnow.methods.loss import LossConfig
from winnow.types import Rollout

SIZES: dict[str, dict[str, Any]] = {
    "0.7M": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1}
    | {"intermediate_size": 384, "vocab_size": 170},
    "25M": {"hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"intermediate_size": 1408, "vocab_size": 4096},
}
GROUP = 8
LOSS = LossConfig(policy_loss="plain", loss_type="sequence_sum")
REPEATS = {"0.7M": 7, "25M": 3}
SLOW = ("two_buffers", "naive")
"""Sides that are measured once, and not warmed up."""


@dataclass(frozen=True)
class Case:
    size: str
    length: int
    """Tokens of the longest rollouts. A quarter is the prompt's; completions have from a third of the rest to all."""
    tokens: int
    """Of the optimizer batch, about; also the budget of a micro-batch."""
    lora: bool = False

    @property
    def groups(self) -> int:
        return max(1, round(self.tokens / (GROUP * self.length * 0.75)))


FULL = [
    *(Case("0.7M", n, 16384) for n in (64, 128, 256, 512, 1024, 2048)),
    *(Case("25M", n, 4096) for n in (64, 256, 1024, 2048)),
    *(Case("25M", n, 4096, lora=True) for n in (64, 512)),
]
QUICK = [Case("0.7M", 64, 4096), Case("0.7M", 512, 4096), Case("25M", 128, 2048), Case("25M", 128, 2048, lora=True)]


def learner_of(case: Case, device: str) -> LocalLearner:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[case.size], max_position_embeddings=4096, tie_word_embeddings=True)
    model: Any = Qwen2ForCausalLM(config).to(device)
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return LocalLearner(model, TokenDistribution(config.vocab_size), LearnerOptions())


def rows_of(case: Case) -> list[Row]:
    """Groups of 8 with rewards of 0 and 1, of which neither is missing."""
    rng, rows = np.random.default_rng(0), []
    vocabulary, prompt, longest = SIZES[case.size]["vocab_size"], case.length // 4, case.length - case.length // 4
    for group in range(case.groups):
        prompt_ids = tuple(rng.integers(0, vocabulary, prompt).tolist())
        for sibling in range(GROUP):
            n = int(rng.integers(longest // 3, longest + 1)) if sibling else longest
            rollout = Rollout(
                sibling=sibling,
                prompt_ids=prompt_ids,
                token_ids=rng.integers(0, vocabulary, n),
                action_mask=np.ones(n, bool),
                sampler_logp=np.full(n, -np.log(vocabulary), np.float32),
                versions=np.zeros(n, np.int32),
            )
            reward = float(sibling % 2 if sibling < 2 else rng.integers(2))
            rows.append(Row(rollout, reward, 1 / (GROUP * case.groups), Pool(group, "gradient")))
    return rows


def sides_of(case: Case, learner: LocalLearner, device: str) -> dict[str, Callable[[], None]]:
    """An update on each side, but for the optimizer's step."""
    rows = rows_of(case)
    plain_rows = [replace(row, advantage=row.advantage - 0.5, pool=None) for row in rows]
    ordinary, apart = (micro_batches(plain_rows, Budget(case.tokens), pad_id=0, device=device) for _ in range(2))
    pooled = micro_batches(rows, Budget(case.tokens), pad_id=0, device=device)
    for batch in apart:
        batch.shared = None
    row_by_row = RowByRow(list(learner._params.values()), learner._logp)

    def norms_first() -> None:
        for batch in pooled:
            row_by_row.add(batch, LOSS, Stats())
        for p in learner._params.values():
            p.grad = None
        over(apart)

    def over(batches: Sequence[MicroBatch]) -> None:
        stats = Stats()
        for batch in batches:
            learner.forward_backward(batch, LOSS, stats)

    def two_buffers() -> None:
        for batch in pooled:
            row_by_row.add(batch, LOSS, Stats())

    return {
        "ordinary": lambda: over(ordinary),
        "apart": lambda: over(apart),
        "opob": lambda: over(pooled),
        "two_buffers": two_buffers,
        "naive": norms_first,
    }


def timed(update: Callable[[], None], learner: LocalLearner) -> float:
    """Seconds, with the optimizer's step."""
    start = time.perf_counter()
    update()
    learner.apply(0.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def memory_of(case: Case, side: str, device: str) -> float:
    """MiB at the peak of two updates, model and optimizer included, in this process; call it in a fresh one."""
    before, peak, over = _resident_mib(), 0.0, threading.Event()
    learner = learner_of(case, device)
    update = sides_of(case, learner, device)[side]

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, _resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(2):
        timed(update, learner)
    over.set()
    watcher.join()
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else peak - before


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(case: Case, repeats: int, device: str) -> dict[str, Any]:
    learner = learner_of(case, device)
    sides = sides_of(case, learner, device)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for side in sides:
        if side not in SLOW:
            timed(sides[side], learner)
    for repeat in range(repeats):
        for side in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            if side not in SLOW or repeat == 0:
                seconds[side].append(timed(sides[side], learner))
    found: dict[str, Any] = {"case": asdict(case) | {"rollouts": GROUP * case.groups}}
    found["seconds"] = {side: [round(s, 4) for s in values] for side, values in seconds.items()}
    for reference in ("ordinary", "apart"):
        found[f"time_to_{reference}"] = {
            side: _spread([a / b for a, b in zip(seconds[side], seconds[reference], strict=False)])
            for side in sides
            if side != reference
        }
    found["peak_mib"] = {side: _in_a_process(case, side, device) for side in sides if side != "naive"}
    found["memory_to_ordinary"] = {s: round(m / found["peak_mib"]["ordinary"], 3) for s, m in found["peak_mib"].items()}
    return found


def _in_a_process(case: Case, side: str, device: str) -> float:
    arguments = ["--memory-of", json.dumps(asdict(case)), side, "--device", device]
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "0"}
    run = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return round(float(run.stdout.split()[-1]), 1)


def _spread(values: list[float]) -> dict[str, float]:
    return {k: round(f(values), 4) for k, f in (("median", statistics.median), ("min", min), ("max", max))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="a check that it works, in a few minutes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-of", nargs=2, metavar=("CASE", "SIDE"), help="used by the benchmark itself")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(memory_of(Case(**json.loads(options.memory_of[0])), options.memory_of[1], options.device))
        return
    if options.out is None:
        parser.error("--out is required")
    said = machine(options.device) | {"threads": options.threads}
    results: dict[str, Any] = {"machine": said, "quick": options.quick, "cases": []}
    for case in QUICK if options.quick else FULL:
        results["cases"].append(found := measure(case, 3 if options.quick else REPEATS[case.size], options.device))
        print(case, found["time_to_ordinary"]["opob"], found["time_to_apart"]["opob"], found["memory_to_ordinary"])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
