"""What it saves to keep keys and values between the turns of a rollout: both sides in one run, in turn.

python benchmarks/bench.py turns --out benchmarks/results/turns.json
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from engine import VOCAB, make_model, make_tokenizer
from harness import in_turn, spread, write_json

from winnow.base.noise import noise_key
from winnow.engine import Finished, LocalEngine, Request, SamplingParams

PROMPT, ACTION, OBSERVATION = 120, 6, 30
"""Tokens of the first prompt, of an action and of an observation: about those of a household text game."""


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


def compare(size: str, turns: int, rollouts: int, repeats: int) -> dict[str, Any]:
    engine = LocalEngine(make_model(size, "cpu", positions=2048), make_tokenizer(), slots=rollouts)
    sides = {
        "again": lambda: episodes(engine, rollouts, turns, keep=False),
        "kept": lambda: episodes(engine, rollouts, turns, keep=True),
    }
    rounds = in_turn(sides, repeats)
    same = []
    for found in rounds:
        pairs = zip(found["again"][1], found["kept"][1], strict=True)
        same.append(sum(a == b for a, b in pairs) / rollouts)
    return {
        "model": size,
        "turns": turns,
        "rollouts": rollouts,
        "ratio": spread(found["again"][0] / found["kept"][0] for found in rounds),
        "same_tokens": min(same),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["0.7M", "25M"])


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    results = []
    for size, turns, rollouts in (("0.7M", 10, 64), ("0.7M", 30, 64), ("25M", 10, 32)):
        if options.only in (None, size):
            results.append(compare(size, turns, rollouts, options.repeats))
            print(json.dumps(results[-1]), flush=True)
    write_json(options.out, results)
