"""What rewritten histories cost: one task with its whole history, with a template that drops turns, and compacted.

python benchmarks/histories.py --out benchmarks/results/histories.json

Runs that the file has are not made again.
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

from harness import ROOT, machine, spread, write_json

sys.path.insert(0, str(ROOT / "examples"))
import compacting_agent as example

DROPS = example.TEMPLATE.replace("<bot> {{ m.content }} <eos>", "<bot> <eos>")
"""Leaves out what the assistant said in earlier turns."""
ARMS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "exact": (example.whole, example.TEMPLATE, {"context_length": None}),
    "template": (example.whole, DROPS, {"context_length": None, "history": "template"}),
    "compaction": (example.compacting, example.TEMPLATE, {}),
}
LAST = 10
"""Steps whose mean reward is the accuracy."""


def run(arm: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    agent, template, settings = ARMS[arm]
    model = example.make_model(folder / "model", template)
    started = time.monotonic()
    rows = example.train(model, agent, folder / "run", max_steps=steps, seed=seed, **settings)
    seconds = time.monotonic() - started
    with sqlite3.connect(folder / "run" / "ledger.sqlite") as db:
        query = "SELECT SUM(prompt_tokens), SUM(tokens), SUM(env_tokens), COUNT(*) FROM rollouts WHERE void = 0"
        prompt, sampled, observed, rollouts = db.execute(query).fetchone()
    return {
        "accuracy": sum(row["reward"] for row in rows[-LAST:]) / LAST,
        "segments": rows[-1].get("segments/mean", 1.0),
        "sampled tokens a rollout": sampled / rollouts,
        "observed tokens a rollout": observed / rollouts,
        "prompt tokens a rollout": prompt / rollouts,
        "seconds a step": seconds / steps,
        "seconds of updates a step": sum(row.get("seconds/update", 0.0) for row in rows) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"runs": {}}
    if arguments.out.exists():
        found = json.loads(arguments.out.read_text(encoding="utf-8"))
    for seed in range(arguments.seeds):
        for arm in ARMS:
            if f"{arm} {seed}" in found["runs"]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found["runs"][f"{arm} {seed}"] = run(arm, seed, arguments.steps, Path(folder))
            runs = {name: [v for k, v in found["runs"].items() if k.startswith(f"{name} ")] for name in ARMS}
            found["arms"] = {
                name: {key: spread(row[key] for row in some) for key in some[0]} for name, some in runs.items() if some
            }
            found |= {"machine": machine("cpu", "torch", "transformers"), "steps": arguments.steps}
            write_json(arguments.out, found)
            print(arm, seed, found["runs"][f"{arm} {seed}"], flush=True)


if __name__ == "__main__":
    main()
