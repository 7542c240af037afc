"""What the mid-trajectory gate costs at one checkpoint, beside the rollout of the group it looks at.

The gate computes one signal and the termination fraction; all seven are only written once a group has ended.

python benchmarks/gate.py --out benchmarks/results/gate.json
python benchmarks/gate.py --rollout-s 26.8        # seconds that a group's rollout takes in your setting

Without --rollout-s the rollout is measured where the ratio is worst: the demo's model of 0.7M parameters on the local
engine, 16 siblings x 20 turns of 8 tokens, and an environment that costs nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from winnow.methods.gate.divergence import Divergence, DivergenceRule
from winnow.methods.gate.signals import SIGNALS
from winnow.types import EnvStep, GroupView, Prompt, Visit

G, K, TOKENS_A_TURN = 16, 20, 8
ACTIONS = [f"go to {place} {i}" for place in ("drawer", "cabinet", "shelf", "countertop") for i in range(1, 6)]


def group(seed: int, agree: float) -> tuple[list[list[str]], list[list[str]]]:
    """G trajectories of K actions and observations that follow a common one with probability `agree` a step."""
    rng = random.Random(seed)
    common = [rng.choice(ACTIONS) for _ in range(K)]
    actions = [[a if rng.random() < agree else rng.choice(ACTIONS) for a in common] for _ in range(G)]
    return actions, [[f"You are at {a}." for a in t] for t in actions]


def view_of(actions: list[list[str]], observations: list[list[str]]) -> GroupView:
    visit = Visit(0, 0, Prompt("p", 0, text=""))
    return GroupView(visit, EnvStep(K), tuple(map(tuple, actions)), tuple(map(tuple, observations)), (True,) * G)


def measure(repeats: int) -> dict[str, Any]:
    """Seconds for each signal, for all seven, and for a decision, on groups from unlike to equal trajectories."""
    groups = [group(i, agree) for i, agree in enumerate((0.0, 0.3, 0.6, 0.9, 1.0))]
    seconds: dict[str, list[float]] = {name: [] for name in (*SIGNALS, "all", "gate")}
    rule = DivergenceRule(Divergence(k=K))
    for _ in range(repeats):
        for actions, observations in groups:
            total = 0.0
            for name, signal in SIGNALS.items():
                started = time.perf_counter()
                signal(actions, observations, K)
                seconds[name].append(time.perf_counter() - started)
                total += seconds[name][-1]
            seconds["all"].append(total)
            view = view_of(actions, observations)
            started = time.perf_counter()
            rule.decide([view])
            seconds["gate"].append(time.perf_counter() - started)
    return {name: {"median": statistics.median(s), "max": max(s)} for name, s in seconds.items()}


def rollout_seconds() -> float:
    """The engine's time for the tokens of one such group."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from winnow.engine import LocalEngine, Request, SamplingParams
    from winnow.study.warm_start import WarmStartConfig, warm_start
    from winnow.tasks.countdown import CountdownConfig

    with tempfile.TemporaryDirectory() as directory:
        warm_start(
            CountdownConfig().build(), Path(directory) / "m", config=WarmStartConfig(max_steps=1, warmup_steps=0)
        )
        tokenizer = AutoTokenizer.from_pretrained(Path(directory) / "m")
        engine = LocalEngine(AutoModelForCausalLM.from_pretrained(Path(directory) / "m"), tokenizer, slots=G)
    sampled, seconds = 0, 0.0
    while sampled < G * K * TOKENS_A_TURN:
        prompt = tuple(tokenizer.encode("numbers 3 5 8 target 16 :"))
        engine.submit([Request(i, prompt, SamplingParams(TOKENS_A_TURN), key=sampled + i) for i in range(G)])
        started = time.perf_counter()
        while engine.pending:
            sampled += sum(len(getattr(event, "token_ids", ())) for event in engine.step())
        seconds += time.perf_counter() - started
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--rollout-s", type=float, help="seconds a group's rollout takes; else measured")
    options = parser.parse_args()
    seconds = measure(options.repeats)
    rollout = options.rollout_s or min(rollout_seconds() for _ in range(5))  # what else the machine does only adds
    result = {
        "G": G,
        "K": K,
        "seconds": seconds,
        "rollout_seconds": rollout,
        "rollout_measured": options.rollout_s is None,
        "share_of_rollout": {name: seconds[name]["median"] / rollout for name in ("gate", "all")},
    }
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
