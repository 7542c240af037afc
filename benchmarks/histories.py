"""What rewritten histories cost: one task with its whole history, with a template that drops turns, and compacted.

python benchmarks/bench.py histories --out benchmarks/results/histories.json
python benchmarks/bench.py histories --model smollm2-135m --out benchmarks/results/histories_135m.json

With `--model` a chat model makes one step a seed, so that only costs are compared: it is not taught the task. Runs that
the file has are not made again.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, machine, read_json, spreads, write_json

from winnow import Trainer
from winnow.env.dataset import DatasetConfig
from winnow.tasks.agents import with_agent

sys.path.insert(0, str(ROOT / "examples"))
import compacting_agent as example

DROPS = example.TEMPLATE.replace("<bot> {{ m.content }} <eos>", "<bot> <eos>")
"""Leaves out what the assistant said in earlier turns."""
ARMS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "exact": (example.whole, example.TEMPLATE, {"context_length": None}),
    "template": (example.whole, DROPS, {"context_length": None, "history": "template"}),
    "compaction": (example.compacting, example.TEMPLATE, {}),
}
STEPS, LAST = 100, 10
"""Of a run, and those at its end whose mean reward is the accuracy."""
LETTER = "Here is a letter that I got today. " + "It says that the weather is fine and that all are well. " * 4
CHAT: dict[str, Any] = {
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_prompt_length": 64,
    "max_completion_length": 1024,
    "learning_rate": 0.0,
    "filter": "keep_all",
    "max_failed_share": 1.0,
}
"""Settings with a chat model."""


def letters(prompt: str, base_url: str, *, room: int | None = None) -> float:
    """Four letters, and a question about the first prompt; compacted from `room` tokens on."""
    messages = [example.user(prompt)]
    said, used = example.ask(base_url, messages)
    for question in (LETTER, LETTER, LETTER, LETTER, "Which word was it?"):
        messages.append({"role": "assistant", "content": said})
        if room is not None and used > room:
            note, _ = example.ask(base_url, [*messages, example.user("Write down what you have to remember.")])
            messages = [example.user(note)]
        messages.append(example.user(question))
        said, used = example.ask(base_url, messages)
    return float(len(said) % 5)  # any reward that varies, so that there is an update


def compacted_letters(prompt: str, base_url: str) -> float:
    return letters(prompt, base_url, room=160)


def whole_letters(prompt: str, base_url: str) -> float:
    return letters(prompt, base_url)


def run_chat(model: str, arm: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """One step of a chat model; the metrics."""
    rows = [json.dumps({"prompt": f"Remember the word {key}.", "answer": key}) for key in example.KEYS]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    agent = compacted_letters if arm == "compaction" else whole_letters
    task = with_agent(DatasetConfig(str(folder / "rows.jsonl")).build(), agent, max_turn_length=24)
    config = CHAT | {"output_dir": str(folder / "run"), "max_steps": 1, "seed": seed}
    config |= {"history": "template"} if arm == "template" else {}
    Trainer(model=model, env=task, config=config).train()
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def measured(model: str | None, arm: str, seed: int, folder: Path) -> dict[str, float]:
    started = time.monotonic()
    if model is None:
        agent, template, settings = ARMS[arm]
        made = example.make_model(folder / "model", template)
        rows = example.train(made, agent, folder / "run", max_steps=STEPS, seed=seed, **settings)
    else:
        rows = run_chat(model, arm, seed, folder)
    seconds = time.monotonic() - started
    with sqlite3.connect(folder / "run" / "ledger.sqlite") as db:
        query = "SELECT SUM(prompt_tokens), SUM(tokens), SUM(env_tokens), COUNT(*) FROM rollouts WHERE void = 0"
        prompt, sampled, observed, rollouts = db.execute(query).fetchone()
    accuracy = {"accuracy": sum(row["reward"] for row in rows[-LAST:]) / LAST} if model is None else {}
    return accuracy | {
        "segments": rows[-1].get("segments/mean", 1.0),
        "sampled tokens a rollout": sampled / rollouts,
        "observed tokens a rollout": observed / rollouts,
        "prompt tokens a rollout": prompt / rollouts,
        "seconds a step": seconds / len(rows),
        "seconds of generation a step": sum(row["seconds/generate"] for row in rows) / len(rows),
        "seconds of updates a step": sum(row.get("seconds/update", 0.0) for row in rows) / len(rows),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model")


def run(options: argparse.Namespace) -> None:
    found: dict[str, Any] = {"runs": {}} | read_json(options.out)
    for seed in range(options.seeds):
        for arm in ARMS:
            if f"{arm} {seed}" in found["runs"]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found["runs"][f"{arm} {seed}"] = measured(options.model, arm, seed, Path(folder))
            runs = {name: [v for k, v in found["runs"].items() if k.startswith(f"{name} ")] for name in ARMS}
            found["arms"] = {name: spreads(rows) for name, rows in runs.items() if rows}
            found |= {"machine": machine("cpu", "torch", "transformers"), "steps": STEPS}
            write_json(options.out, found)
            print(arm, seed, found["runs"][f"{arm} {seed}"], flush=True)
