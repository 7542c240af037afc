"""An update over two ranks (`learner: fsdp`, gloo) beside the same update in one process: time, CPU time, memory.

    .venv-scale/bin/python benchmarks/scale_learner.py --out benchmarks/results/scale_learner.json

Sides take turns on the same rows: one process with one thread, one with two, two ranks of one thread each. An update
is forward, backward and the optimizer's step; that over ranks is timed from the driver, with the rows on their way.
Prompts of siblings are computed once in one process and by each sibling over ranks, as in runs. Memory is what a
process had at most during updates, over what it had before it got the model.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import opob
import ray
import torch
from machine import machine
from transformers import Qwen2Config, Qwen2ForCausalLM

from winnow.config import RunConfig, validate
from winnow.learner import Local, Policy
from winnow.learner.batch import Row
from winnow.learner.fsdp.learner import FsdpLearner
from winnow.learner.fsdp.ranks import Ranks
from winnow.methods.loss import LossConfig
from winnow.study.warm_start import word_tokenizer

LOSS = LossConfig(policy_loss="plain")
CASES = {"0.7M": opob.Case("0.7M", 128, 4_096), "25M": opob.Case("25M", 128, 2_048)}
REPEATS = {"0.7M": 7, "25M": 3}
PATIENCE_S = 600.0


def usage(reset: bool) -> dict[str, float]:
    """CPU seconds and memory (MiB) of this process; `reset`: its peak counts from now on."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return {"cpu": time.process_time(), "mib": now, "peak_mib": peak}


class Alone:
    """A learner of one process, in a process of its own."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def build(self, policy: Policy, config: RunConfig) -> None:
        self.learner = Local().build(policy, config)

    def update(self, rows: Sequence[Row]) -> float:
        started = time.perf_counter()
        self.learner.accumulate(rows, LOSS)
        self.learner.apply(1e-5)
        return time.perf_counter() - started


class AloneSide:
    def __init__(self, threads: int, policy: Policy, config: RunConfig) -> None:
        actor = ray.remote(Alone).options(num_cpus=threads, runtime_env=_threads(threads))
        self.actors = [actor.remote(threads)]
        self.before = used(self.actors, reset=False)
        ray.get(self.actors[0].build.remote(policy, config), timeout=PATIENCE_S)

    def update(self, rows: Sequence[Row]) -> float:
        return float(ray.get(self.actors[0].update.remote(rows), timeout=PATIENCE_S))

    def close(self) -> None:
        ray.kill(self.actors[0])


class RanksSide:
    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self.ranks = Ranks(world=2, threads=1, num_gpus=0, timeout_s=PATIENCE_S)
        self.actors = list(self.ranks._actors)
        self.before = used(self.actors, reset=False)
        self.learner = FsdpLearner(self.ranks, *self.ranks.build(policy, config))

    def update(self, rows: Sequence[Row]) -> float:
        started = time.perf_counter()
        self.learner.accumulate(rows, LOSS)
        self.learner.apply(1e-5)
        return time.perf_counter() - started

    def close(self) -> None:
        self.ranks.close()


def _threads(n: int) -> dict[str, Any]:
    return {"env_vars": {"OMP_NUM_THREADS": str(n)}}


def used(actors: Sequence[Any], *, reset: bool) -> list[dict[str, float]]:
    """Of each process."""
    asked = [actor.__ray_call__.remote(lambda self, reset: usage(reset), reset) for actor in actors]
    found: list[dict[str, float]] = ray.get(asked, timeout=PATIENCE_S)
    return found


def policy_of(size: str) -> Policy:
    torch.manual_seed(0)
    config = Qwen2Config(**opob.SIZES[size], max_position_embeddings=4096, tie_word_embeddings=True)
    tokenizer = word_tokenizer([f"w{i}" for i in range(config.vocab_size - 2)], 4096)
    return Policy(Qwen2ForCausalLM(config), tokenizer, None)


def measure(size: str) -> dict[str, Any]:
    case = CASES[size]
    config = validate({"model": "given", "env": "countdown", "max_completion_length": case.length})
    rows = [replace(row, advantage=row.advantage - 0.5, pool=None) for row in opob.rows_of(case)]
    policy = policy_of(size)
    sides: dict[str, AloneSide | RanksSide] = {
        "one thread": AloneSide(1, copy.deepcopy(policy), config),
        "two threads": AloneSide(2, copy.deepcopy(policy), config),
        "two ranks": RanksSide(copy.deepcopy(policy), config),
    }
    for side in sides.values():  # warms up, and makes the optimizer's state
        side.update(rows)
        used(side.actors, reset=True)
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(REPEATS[size]):
        found = {}
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            before, own = used(sides[name].actors, reset=False), time.process_time()
            seconds = sides[name].update(rows)
            own, after = time.process_time() - own, used(sides[name].actors, reset=False)
            cpu = sum(a["cpu"] - b["cpu"] for a, b in zip(after, before, strict=True))
            found[name] = {"seconds": seconds, "cpu_seconds": cpu, "driver_cpu_seconds": own}
            print(size, name, found[name], flush=True)
        rounds.append(found)
    memory = {
        name: [
            round(now["peak_mib"] - b["mib"], 1) for now, b in zip(used(s.actors, reset=False), s.before, strict=True)
        ]
        for name, s in sides.items()
    }
    started = time.perf_counter()
    assert isinstance(sides["two ranks"], RanksSide)
    sides["two ranks"].learner.weights().state_dict()
    gather = time.perf_counter() - started
    for side in sides.values():
        side.close()
    return {
        "rollouts": len(rows),
        "tokens": sum(row.length for row in rows),
        "parameters": policy.model.num_parameters(),
        "sides": {n: {k: spread([r[n][k] for r in rounds]) for k in rounds[0][n]} for n in sides},
        "two_ranks_over": {n: spread([r["two ranks"]["seconds"] / r[n]["seconds"] for r in rounds]) for n in sides},
        "cpu_over_one_thread": {
            n: spread([r[n]["cpu_seconds"] / r["one thread"]["cpu_seconds"] for r in rounds]) for n in sides
        },
        "peak_mib": memory,
        "gather_seconds": gather,
        "turns": rounds,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    said = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"sizes": {}}
    said |= {"what": __doc__, "machine": machine("cpu", "ray")}
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    for size in options.only:
        said["sizes"][size] = found = measure(size)
        print(size, {k: v for k, v in found.items() if k != "turns"}, flush=True)
        options.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()
