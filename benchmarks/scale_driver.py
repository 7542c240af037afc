"""What a group costs the driver: 1 to 64 simulated samplers, 10^2 to 10^5 groups in flight.

    python benchmarks/bench.py scale_driver --out benchmarks/results/scale_driver.json

Loop, pool, codec, selector (GRESO), filter, pace, buffer and ledger are those of a run; samplers answer with groups of
8 rollouts x 64 to 256 tokens, encoded as a sampler does. Weights and updates are left out. The unit is CPU time of
this process, by part, each without the parts inside it:

    transport   the messages' bytes made objects: JSON lines (`pipe`), or pickle, as Ray does (`ray`)
    decode      groups made of them (`sampler/codec.py`)
    pool        launched, taken, watched over
    ledger      visits and fates booked
    loop        everything else: selector, filter, pace, buffer, tally
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from harness import machine, write_json
from tables import fill, markdown

from winnow.base.machine import heap_frozen
from winnow.collect import Collector
from winnow.config import validate
from winnow.record.ledger import Ledger
from winnow.record.stop_conditions import Limits
from winnow.run.build_methods import build_collector, build_methods
from winnow.run.resolved import Options
from winnow.sampler import SamplerContext, pool
from winnow.sampler.base import PoolOptions
from winnow.sampler.codec import group_from, group_state
from winnow.sampler.handle import Inbox, Message
from winnow.sampler.pool import SamplerPool
from winnow.study.warm_start import word_tokenizer
from winnow.types import Group, Prompt, Rollout, Turn, Visit

Kind = Literal["pipe", "ray"]
SIBLINGS, SHORTEST, LONGEST, PROMPT_TOKENS, VOCABULARY = 8, 64, 256, 100, 32_000
GROUPS, REPEATS = 1_000, 3
"""Groups that are measured, at least; repeats of cells with less than 10^5 groups in flight."""
GROUPS_A_STEP = 1_000
"""At most, and a tenth of what is in flight: `max_lag` is what that needs."""
PROMPTS = [Prompt(f"p{i}", i, text="p") for i in range(100_000)]
SENT: tuple[Kind, ...] = ("pipe", "ray")
CELLS = [
    *((8, in_flight, 1) for in_flight in (1_000, 100, 10_000, 100_000)),
    *((samplers, 1_000, 1) for samplers in (1, 64)),
    (64, 100_000, 1),
    (8, 1_000, 64),
]
"""Samplers, groups in flight, and groups that have come at each poll: one, when the driver waits for each."""
PARTS = ("transport", "decode", "pool", "ledger", "loop")


def recorded(version: int, seed: int) -> Group:
    """A finished group; that of seed 0 has equal rewards."""
    rng = np.random.default_rng(seed)
    prompt_ids = tuple(rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist())
    rollouts = []
    for sibling in range(SIBLINGS):
        n = int(rng.integers(SHORTEST, LONGEST + 1))
        text = " ".join(f"{word:04x}" for word in rng.integers(0, 1 << 16, n))
        logp = -rng.exponential(0.5, n).astype(np.float32)
        arrays = rng.integers(0, VOCABULARY, n), np.ones(n, bool), logp, np.full(n, version, np.int32)
        reward = float(seed > 0 and sibling % 2)
        more: dict[str, Any] = {"reward": reward, "rewards": {"correct": reward}, "seconds": 0.1, "stop_reason": "eos"}
        rollouts.append(Rollout(sibling, prompt_ids, *arrays, [Turn(text, None, 0, n, "eos")], text=text, **more))
    return Group(Visit(0, 0, PROMPTS[0]), rollouts)


class Shares:
    """CPU seconds by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._parts = ["loop"]
        self._at = time.process_time()

    def book(self) -> None:
        now = time.process_time()
        self.seconds[self._parts[-1]] = self.seconds.get(self._parts[-1], 0.0) + now - self._at
        self._at = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.book()
        self._parts.append(name)
        yield
        self.book()
        self._parts.pop()

    def watch(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **named: Any) -> Any:
            with self.part(name):
                return inner(*args, **named)

        setattr(owner, method, timed)


class Samplers:
    """All of them. Each answers its jobs in order, when it is told to; weights it has at once."""

    def __init__(self, kind: Kind, shares: Shares) -> None:
        self.kind, self.shares = kind, shares
        self.version = 0
        self._working: deque[tuple[Channel, dict[str, Any]]] = deque()
        self._messages: dict[tuple[int, int], dict[str, Any]] = {}
        self._answered = 0

    def told(self, channel: Channel, content: dict[str, Any]) -> None:
        if "launch" in content:
            self._working.append((channel, content["launch"]))
            return
        if "start" in content:
            channel.inbox.put(Message(channel, {"built": True}))
            return
        self.version = content["version"]
        channel.inbox.put(Message(channel, {"loaded": self.version, "dtype": "float32", "logged": {}}))

    def answer(self, n: int) -> None:
        with self.shares.part("simulation"):
            for _ in range(min(n, len(self._working))):
                channel, job = self._working.popleft()
                data = self.encoded(job["visit"])
                with self.shares.part("transport"):
                    content = json.loads(data) if self.kind == "pipe" else pickle.loads(data)
                channel.inbox.put(Message(channel, content))

    def encoded(self, visit: list[Any]) -> bytes:
        self._answered += 1
        key = self.version, self._answered % 4
        if key not in self._messages:
            self._messages = {k: v for k, v in self._messages.items() if k[0] == self.version}
            self._messages[key] = group_state(recorded(*key))
        content = {"group": self._messages[key] | {"visit": visit}}
        return json.dumps(content).encode() if self.kind == "pipe" else pickle.dumps(content, 5)


class Channel:
    def __init__(self, inbox: Inbox, samplers: Samplers) -> None:
        self.inbox, self.samplers = inbox, samplers
        inbox.put(Message(self, {"placed": ""}))

    def send(self, content: dict[str, Any]) -> None:
        with self.samplers.shares.part("transport"):
            json.dumps(content) if self.samplers.kind == "pipe" else pickle.dumps(content, 5)
        with self.samplers.shares.part("simulation"):
            self.samplers.told(self, content)

    def kill(self) -> str:
        return "it was killed"


class Nowhere:
    """Weights that nobody reads."""

    version = -1
    bytes = 0

    def write(self, weights: Any, version: int) -> None:
        self.version = version

    def message(self) -> dict[str, Any]:
        return {"weights": "nowhere", "version": self.version}

    def remove(self) -> None: ...


def collector_of(
    kind: Kind, samplers: int, in_flight: int, polled: int, folder: Path, shares: Shares
) -> tuple[Collector, SamplerPool]:
    a_step = min(in_flight // 10, GROUPS_A_STEP)
    max_lag = in_flight // a_step - 1
    settings = {"model": "m", "env": "countdown", "output_dir": str(folder), "selector": "greso", "max_lag": max_lag}
    c = validate(settings | {"num_generations": SIBLINGS, "filter": "zero_variance", "correction": "truncate"})
    task: Any = SimpleNamespace(train=PROMPTS, test=[], max_turns=1, fingerprint=lambda: "")
    tokenizer = word_tokenizer(["w"], 8)
    context = SamplerContext({}, folder, task, tokenizer, greedy_baseline=False, behind=max_lag, runner=None)
    simulated = Samplers(kind, shares)
    options = PoolOptions(samplers=samplers, timeout_s=1e9)
    sampler = SamplerPool(options, context, Nowhere(), lambda inbox: Channel(inbox, simulated))
    methods = build_methods(c, Options.from_config(c), PROMPTS)
    ledger, limits = Ledger.open(folder / "ledger.sqlite"), Limits(10**9, 1.0, 10**9)
    collector = build_collector(c, methods, sampler, ledger, {"train": PROMPTS}, asynchronous=True, limits=limits)
    poll = sampler.poll
    sampler.poll = lambda: (simulated.answer(polled), poll())[1]  # type: ignore[method-assign]
    pool.group_from = group_from
    for owner, names, part in (
        (pool, ("group_from",), "decode"),
        (sampler, ("launch", "poll", "publish"), "pool"),
        (ledger, ("visit", "finish", "step"), "ledger"),
    ):
        for name in names:
            shares.watch(owner, name, part)
    return collector, sampler


def measure(kind: Kind, samplers: int, in_flight: int, polled: int) -> dict[str, Any]:
    """Microseconds of a group by part, in the middle of a run: after the pipeline is full, over whole steps."""
    with tempfile.TemporaryDirectory() as directory:
        shares = Shares()
        collector, sampler = collector_of(kind, samplers, in_flight, polled, Path(directory), shares)
        sampler.publish({}, [], 0)
        step = 0

        def one_step() -> None:
            nonlocal step
            update = {"updated": 1.0}
            batch = collector.collect(step)
            collector.trained(step, batch, update)
            sampler.publish({}, [], step + 1)
            collector.end_step(step, batch.groups, update | sampler.metrics())
            step += 1

        one_step()
        before = _finished(collector.ledger)
        shares.book()
        shares.seconds.clear()
        started = time.perf_counter()
        with heap_frozen():  # as in a run
            while _finished(collector.ledger) - before < GROUPS:
                one_step()
        shares.book()
        wall = time.perf_counter() - started
        done = _finished(collector.ledger) - before
        collector.ledger.close()
    found = {part: round(1e6 * shares.seconds.get(part, 0.0) / done, 1) for part in PARTS}
    total = sum(found.values())
    return {"us_a_group": found | {"total": round(total, 1)}, "groups": done, "wall_s": round(wall, 2)}


def _finished(ledger: Ledger) -> int:
    return int(ledger._db.execute("SELECT COUNT(*) FROM outcomes").fetchone()[0])


def driver_table(cells: list[dict[str, Any]]) -> str:
    """CPU milliseconds of a group, and of its parts; medians, and of the whole the least and the most, too."""
    rows = []
    for cell in sorted(cells, key=lambda c: (c["polled"], c["in_flight"], c["samplers"])):
        for kind in SENT:
            turns = [turn["us_a_group"] for turn in cell[kind]]
            if not turns:
                continue
            whole = [turn["total"] / 1000 for turn in turns]
            total = f"{statistics.median(whole):.1f} ({min(whole):.1f} to {max(whole):.1f})"
            parts = [f"{statistics.median(turn[part] for turn in turns) / 1000:.2f}" for part in PARTS]
            rows.append([f"{cell['in_flight']:,}", str(cell["samplers"]), str(cell["polled"]), kind, total, *parts])
    return markdown(["in flight", "samplers", "groups a poll", "messages", "ms a group", *PARTS], rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", type=Path, help="Markdown file whose table is replaced")


def run(options: argparse.Namespace) -> None:
    results: dict[str, Any] = {"what": __doc__, "machine": machine("cpu"), "cells": []}
    for samplers, in_flight, polled in CELLS:
        cell: dict[str, Any] = {"in_flight": in_flight, "samplers": samplers, "polled": polled, "pipe": [], "ray": []}
        results["cells"].append(cell)
        for _ in range(REPEATS if in_flight < 100_000 else 1):
            for kind in SENT if in_flight < 100_000 else SENT[1:]:
                cell[kind].append(measure(kind, samplers, in_flight, polled))
                print(samplers, in_flight, polled, kind, cell[kind][-1], flush=True)
                write_json(options.out, results)
    if options.docs:
        fill(options.docs, {"scale-driver": driver_table(results["cells"])})
