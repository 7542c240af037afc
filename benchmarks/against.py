"""Winnow of this tree against that of another commit: the same engine and step workloads, alternating.

    python benchmarks/against.py COMMIT --out benchmarks/results/against.json

Each side runs its own benchmarks/engine.py and benchmarks/step.py, without their other sides, in processes of its own.
A ratio is this tree's seconds over the other's, within one repeat: below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
THREADS = 1


def engine_seconds() -> dict[str, float]:
    """Median of several runs of each workload of the 0.7M model, in both precisions."""
    import engine
    import torch

    torch.set_num_threads(THREADS)
    found = {}
    for size, name in engine.WORKLOADS:
        if size == "0.7M":
            work, model = engine.WORKLOADS[size, name], engine.make_model(size, "cpu")
            requests = engine.make_requests(work)
            for dtype in ("float32", "bfloat16"):
                run = engine.engine_run(model, requests, work.slots, dtype)
                run()
                found[f"engine, {name}, {dtype}"] = statistics.median(run() for _ in range(3))
    return found


def step_seconds(steps: int) -> dict[str, float]:
    """Median seconds of a whole step and its phases' means, on the demo's model and prompts."""
    import step
    from workloads import short_workload

    with tempfile.TemporaryDirectory() as directory:
        work = short_workload(Path(directory), teaching_steps=30, prompts_per_step=32)
        run = step.run_winnow(work, step.Setting(THREADS, "highest"), steps, "cpu")
    return {"step": statistics.median(run.step_seconds)} | {f"step, {k}": v for k, v in run.phases.items() if v > 1e-3}


def measure(tree: Path, steps: int) -> dict[str, float]:
    """One repeat of one side, in a process that sees only its tree."""
    path = os.pathsep.join([str(tree / "src"), str(tree / "benchmarks")])
    call = [sys.executable, "-P", __file__, "--side", str(steps)]
    said = subprocess.run(call, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


def compare(other: Path, repeats: int, steps: int) -> dict[str, Any]:
    """Both sides in turn, the first one changing."""
    runs: list[dict[str, dict[str, float]]] = []
    for repeat in range(repeats):
        order = [("this", ROOT), ("other", other)]
        runs.append({side: measure(tree, steps) for side, tree in (order if repeat % 2 == 0 else order[::-1])})
        print(f"{repeat + 1}/{repeats}: {_ratios(runs)}", flush=True)
    return {"ratios": _ratios(runs), "runs": runs}


def _ratios(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in runs[0]["this"].keys() & runs[0]["other"].keys():
        ratios = [run["this"][name] / run["other"][name] for run in runs]
        found[name] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: {k: round(v, 3) for k, v in found[name].items()} for name in sorted(found)}


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        print(json.dumps(engine_seconds() | step_seconds(int(sys.argv[2]))))
        return
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        other = Path(directory) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(other), options.commit], check=True, capture_output=True)
        try:
            found = compare(other, options.repeats, options.steps)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True, capture_output=True)
    said = {"what": __doc__, "machine": machine("cpu"), "commit": options.commit, **found}
    options.out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
