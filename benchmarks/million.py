"""A million rollouts through loop, ledger, audit, report and resume, with an engine that answers at once.

    python benchmarks/bench.py million --out benchmarks/results/million.json

Everything is that of a run but the engine, whose tokens are drawn by their keys without a model, and the model, of two
layers. Each size is a run of its own in processes of its own; the commands are those that a user types.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, write_json

from winnow.base.weights import Weights
from winnow.engine import ModelReference
from winnow.engine.base import Event, Finished, Request

PROMPTS_PER_STEP, SIBLINGS, PROMPTS = 512, 8, 20_000
WORDS = [f"w{i}" for i in range(60)]
LONGEST = 6
BEGUN = Path("begun")
"""Made in the working directory when the engine is first asked for a batch: the run has started, or been resumed."""


@dataclass(frozen=True)
class Instant:
    """Sequences of one to `LONGEST` tokens at once."""

    def build(self, model: ModelReference, tokenizer: Any) -> InstantEngine:
        return InstantEngine(tokenizer.eos_token_id)


class InstantEngine:
    provides = frozenset({"keyed_noise"})

    def __init__(self, eos: int) -> None:
        self._eos, self._waiting = eos, dict[Hashable, Request]()
        self.version = self.clock = 0

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        self._waiting.update((r.id, r) for r in requests)

    def cancel(self, ids: Iterable[Hashable]) -> list[Finished]:
        return [self._finished(self._waiting.pop(i), "cancelled") for i in ids if i in self._waiting]

    def step(self) -> list[Event]:
        if len(self._waiting) > SIBLINGS * 10 and not BEGUN.exists():  # more than the sequences that a start compares
            BEGUN.touch()
        found: list[Event] = [self._finished(r, "eos") for r in self._waiting.values()]
        self._waiting.clear()
        self.clock += 1
        return found

    def _finished(self, request: Request, reason: str) -> Finished:
        rng = random.Random(request.key)
        n = rng.randint(1, min(LONGEST, request.params.max_tokens))
        tokens = np.array([*rng.choices(range(2, 2 + len(WORDS)), k=n - 1), self._eos])
        logp, versions = np.full(n, -4.0, np.float32), np.full(n, self.version, np.int32)
        return Finished(request.id, tokens, logp, versions, reason, 1e-5)

    def load_weights(self, weights: Weights, version: int) -> None:
        self.version = version


def even(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 2) for text in completions]


def make(folder: Path) -> dict[str, Any]:
    """Model, rows and the configuration of a run in the folder."""
    from winnow.study.warm_start import WarmStartConfig, small_model, word_tokenizer

    tokenizer = word_tokenizer(WORDS, max_positions=32)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": 32}
    small_model(tokenizer, WarmStartConfig(**sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(PROMPTS):
            file.write(json.dumps({"id": f"q{number}", "prompt": " ".join(rng.choices(WORDS, k=4))}) + "\n")
    return {
        "model": str(folder / "model"),
        "env": {"name": "dataset", "path": str(folder / "rows.jsonl")},
        "reward_funcs": [f"{__file__}:even"],
        "engine": {"name": "million:Instant"},
        "output_dir": str(folder / "run"),
        "prompts_per_step": PROMPTS_PER_STEP,
        "num_generations": SIBLINGS,
        "max_prompt_length": 8,
        "max_completion_length": LONGEST,
        "selector": "greso",
        "learning_rate": 1e-5,
        "save_steps": 50,
        "save_total_limit": 2,
        "log_completions": 2,
        "threads": 1,
    }


def timed(*command: str, folder: Path) -> dict[str, float]:
    """Seconds and peak memory of a process. Its output is its own when it fails."""
    before = time.monotonic()
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with (folder / "log").open("w+") as log:
        environment = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
        log.seek(0)
        if status:
            raise SystemExit(f"{' '.join(command)}: {log.read()[-3000:]}")
    return {"seconds": round(time.monotonic() - before, 2), "peak_mib": used.ru_maxrss >> 10}


def measured(rollouts: int) -> dict[str, Any]:
    """One run of about so many rollouts, and what reads it."""
    winnow = str(Path(sys.executable).with_name("winnow"))
    steps = -(-rollouts // (PROMPTS_PER_STEP * SIBLINGS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make(folder) | {"max_steps": steps}
        (folder / "c.yaml").write_text(json.dumps(config))
        found: dict[str, Any] = {"steps": steps, "run": timed(winnow, "train", str(folder / "c.yaml"), folder=folder)}
        run = folder / "run"
        found["verify"] = timed(winnow, "verify", str(run), "--json", folder=folder)
        found["rollouts"] = json.loads((folder / "log").read_text())["rollouts"]
        found["report"] = timed(winnow, "report", str(run), "-o", str(folder / "page.html"), folder=folder)
        found["report"]["page_mib"] = round((folder / "page.html").stat().st_size / 2**20, 2)
        found["ledger_mib"] = round((run / "ledger.sqlite").stat().st_size / 2**20, 1)
        (folder / BEGUN).unlink()
        started = time.time()
        found["resume_and_one_step"] = timed(winnow, "resume", str(run), f"max_steps={steps + 1}", folder=folder)
        found["resume"] = {"seconds": round((folder / BEGUN).stat().st_mtime - started, 2)}
        found["run_per_1000_rollouts_s"] = round(1000 * found["run"]["seconds"] / found["rollouts"], 3)
    return found


def run(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"machine": machine("cpu"), "sizes": {}}
    for size in (10_000, 100_000, 1_000_000):
        result["sizes"][size] = measured(size)
        print(size, json.dumps(result["sizes"][size]), flush=True)
        write_json(options.out, result)
