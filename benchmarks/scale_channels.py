"""Samplers behind pipes (`sync: processes`) beside samplers as Ray actors (`sync: ray`): both real, in turn.

    .venv-scale/bin/python benchmarks/scale_channels.py --out benchmarks/results/scale_channels.json

Two samplers on each side, one thread each. Throughput: Countdown, 8 rollouts a group, everything launched at once.
Groups a second are by the clock, and depend on who else uses the cores; CPU time (us a group) does so less.
Publishing: weights written until both samplers said that they have them; samplers are idle, as at the end of a batch.
A sampler's engine, and so the time that it takes to load, is the same on both sides. Messages are counted in turns of
their own, bytes as they are in the pipe (JSON) or as Ray would pickle them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from machine import machine

from winnow.base.weights import StateWeights
from winnow.config import RunConfig, validate
from winnow.engine.loading import load_causal_lm, load_tokenizer
from winnow.run.build import build_task
from winnow.sampler import SamplerContext
from winnow.sampler.handle import Message
from winnow.sampler.pool import SamplerPool
from winnow.sampler.processes import Processes
from winnow.sampler.ray import Ray
from winnow.study.warm_start import WarmStartConfig, small_model, word_tokenizer
from winnow.types import Job, Visit

SAMPLERS, SIBLINGS = 2, 8
SIZES: dict[str, dict[str, int]] = {
    "0.02M": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2},
    "0.6M": {},
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 9, "num_heads": 8, "num_kv_heads": 2},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 38, "num_heads": 9, "num_kv_heads": 3},
}
"""Llamas, float32, with the vocabulary of Countdown."""
THROUGHPUT = {"0.02M": 200, "0.6M": 100}
"""Groups a turn."""
PUBLISHED = {"0.6M": 10, "25M": 7, "135M": 3}
"""Turns."""
PATIENCE_S = 600.0


class Counted(queue.SimpleQueue):  # type: ignore[type-arg]
    """An inbox that keeps what it was given while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[str, Any]] | None = None

    def put(self, message: Message, *named: Any) -> None:
        if self.heard is not None and message.content is not None:
            self.heard.append(message.content)
        super().put(message, *named)


class Side:
    """A pool of real samplers."""

    def __init__(self, name: str, config: RunConfig, tokenizer: Any) -> None:
        self.name = name
        self.task = build_task(config.env)
        context = SamplerContext(config, self.task, tokenizer, False, 1, None, entry="winnow.run.serve")
        options = {"pipe": Processes, "ray": Ray}[name](samplers=SAMPLERS)
        self.pool: SamplerPool = options.build(context)
        self.inbox = Counted()
        self.pool._inbox = self.inbox
        self.version = self._visits = 0

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: not done within {PATIENCE_S:g} s")
            self.pool.poll()

    def start(self, weights: StateWeights) -> None:
        self.pool.publish(weights, [], 0)
        self.until(lambda: all(member.ready for member in self.pool._members))

    def publish(self, weights: StateWeights) -> dict[str, float]:
        """Seconds that the learner is held for, and until both samplers have them."""
        self.version += 1
        started = time.perf_counter()
        self.pool.publish(weights, [], self.version)
        held = time.perf_counter() - started
        self.until(lambda: self.pool.version == self.version)
        return {"held": held, "loaded": time.perf_counter() - started}

    def launch(self, groups: int) -> list[Job]:
        prompts = self.task.train
        first, self._visits = self._visits, self._visits + groups
        jobs = [Job(Visit(n, 0, prompts[n % len(prompts)]), SIBLINGS) for n in range(first, first + groups)]
        for job in jobs:
            self.pool.launch(job)
        return jobs

    def sample(self, groups: int) -> dict[str, float]:
        """Groups a second; CPU time (us a group) of the driver, the samplers and Ray's own processes."""
        before, started = self.spent(), time.perf_counter()
        self.launch(groups)
        self.until(lambda: not self.pool.pending)
        seconds, after = time.perf_counter() - started, self.spent()
        return {"groups_per_s": groups / seconds} | {k: 1e6 * (after[k] - before[k]) / groups for k in after}

    def spent(self) -> dict[str, float]:
        """CPU seconds until now."""
        ours = {"pipe": "winnow.run.serve", "ray": "SamplerActor"}[self.name]
        return {
            "driver": time.process_time(),
            "samplers": child_seconds(lambda process: ours in " ".join(process.cmdline())),
            "ray": child_seconds(lambda process: process.name() in ("raylet", "gcs_server")) * (self.name == "ray"),
        }

    def count(self, groups: int) -> dict[str, float]:
        """Messages and bytes of a group, both ways; heartbeats are said apart: they come by the second, too."""
        size = (lambda c: len(json.dumps(c)) + 1) if self.name == "pipe" else (lambda c: len(pickle.dumps(c, 5)))
        self.inbox.heard, told = [], []
        for member in self.pool._members:
            send = member.channel.send
            member.channel.send = lambda c, send=send: (told.append(c), send(c))[1]  # type: ignore[method-assign]
        self.launch(groups)
        self.until(lambda: not self.pool.pending)
        heard, self.inbox.heard = self.inbox.heard, None
        for member in self.pool._members:
            del member.channel.send
        back = [content for content in heard if "group" in content]
        return {
            "messages_there": len(told) / groups,
            "bytes_there": sum(map(size, told)) / groups,
            "messages_back": len(back) / groups,
            "bytes_back": sum(map(size, back)) / groups,
            "heartbeats": (len(heard) - len(back)) / groups,
        }


def child_seconds(counts: Callable[[psutil.Process], bool]) -> float:
    """CPU seconds of the processes under this one that count."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone
            total += sum(process.cpu_times()[:2]) if counts(process) else 0.0
    return total


def sides_of(size: str, folder: Path) -> tuple[dict[str, Side], StateWeights, int]:
    sizes: dict[str, Any] = SIZES[size]
    path = folder / size
    task: Any = build_task("countdown")
    tokenizer = word_tokenizer(task.vocabulary(), 512)
    torch.manual_seed(0)
    small_model(tokenizer, WarmStartConfig(**sizes)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    model = load_causal_lm(str(path), torch.device("cpu"))
    weights = StateWeights(model.state_dict())
    found = {}
    for name in ("pipe", "ray"):
        values = {"model": str(path), "env": "countdown", "output_dir": str(folder / f"{size}-{name}"), "max_lag": 1}
        c = validate(values | {"max_prompt_length": 32, "max_completion_length": 24, "correction": "truncate"})
        os.makedirs(c.output_dir)
        found[name] = Side(name, c, load_tokenizer(str(path)))
        found[name].start(weights)
    return found, weights, model.num_parameters()


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(size: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sides, weights, parameters = sides_of(size, Path(folder))
        found: dict[str, Any] = {"parameters": parameters, "bytes": 4 * parameters}
        try:
            if size in THROUGHPUT:
                found["sampling"] = turns(sides, repeats, lambda side: side.sample(THROUGHPUT[size]))
                found["messages"] = {name: side.count(50) for name, side in sides.items()}
            if size in PUBLISHED:
                found["publishing"] = turns(sides, PUBLISHED[size], lambda side: side.publish(weights))
        finally:
            for side in sides.values():
                side.pool.close()
    return found


def turns(sides: dict[str, Side], repeats: int, what: Callable[[Side], dict[str, float]]) -> dict[str, Any]:
    """What both sides give, in turn, and Ray's over the pipes' turn by turn; the first turn warms up."""
    got: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            got[name].append(what(sides[name]))
    counted = {name: rows[1:] for name, rows in got.items()}
    keys = counted["pipe"][0]
    pairs = list(zip(counted["ray"], counted["pipe"], strict=True))
    return {
        **{name: {key: spread([row[key] for row in rows]) for key in keys} for name, rows in counted.items()},
        "ray_over_pipe": {
            key: spread([a[key] / b[key] for a, b in pairs]) for key in keys if all(b[key] for _, b in pairs)
        },
        "turns": counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7, help="turns of sampling")
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    said = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"sizes": {}}
    said["what"] = __doc__
    ray.init("local", num_cpus=max(4, SAMPLERS), include_dashboard=False, log_to_driver=False)
    for size in options.only:
        load = machine("cpu", "ray")  # as it was when this size began
        said["sizes"][size] = found = measure(size, options.repeats) | {"machine": load}
        print(
            size,
            {
                k: {n: v[n] for n in ("pipe", "ray", "ray_over_pipe") if n in v}
                for k, v in found.items()
                if isinstance(v, dict)
            },
            flush=True,
        )
        options.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()
