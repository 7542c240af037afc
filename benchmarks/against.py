"""Winnow of this tree against that of another commit: the same engine and step workloads, alternating.

    python benchmarks/against.py COMMIT --out benchmarks/results/against.json

Each side runs its own benchmarks/engine.py and benchmarks/step.py, without their other sides, in a process that stays.
They take turns, one short run each, so that a machine whose speed drifts disturbs both alike. A ratio is this tree's
seconds over the other's of the same turn: below 1 is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
THREADS = 1
STEPS = 5
"""Of a training run, after its first."""


def engine_runs() -> dict[str, Callable[[], dict[str, float]]]:
    """The workloads of the 0.7M model, in both precisions."""
    import engine

    found = {}
    for size, name in engine.WORKLOADS:
        if size == "0.7M":
            work, model = engine.WORKLOADS[size, name], engine.make_model(size, "cpu")
            for dtype in ("float32", "bfloat16"):
                key = f"engine, {name}, {dtype}"
                run = engine.engine_run(model, engine.make_requests(work), work.slots, dtype)
                found[key] = lambda key=key, run=run: {key: run()}
    return found


def step_run(directory: str) -> Callable[[], dict[str, float]]:
    """Median seconds of a whole step and the means of its phases, on the demo's model and prompts."""
    import step
    from workloads import short_workload

    work = short_workload(Path(directory), teaching_steps=30, prompts_per_step=32)

    def run() -> dict[str, float]:
        found = step.run_winnow(work, step.Setting(THREADS, "highest"), STEPS, "cpu")
        return {"step": statistics.median(found.step_seconds), **{f"step, {k}": v for k, v in found.phases.items()}}

    return run


def serve() -> None:
    """A side: runs the workload that a line names, and answers with its seconds."""
    import torch

    torch.set_num_threads(THREADS)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as directory:
        runs = engine_runs() | {"step": step_run(directory)}
        for run in runs.values():
            run()
        print(json.dumps(list(runs)), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(runs[line.strip()]()), file=answers, flush=True)


@contextlib.contextmanager
def side(tree: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that sees only its tree."""
    path = os.pathsep.join([str(tree / "src"), str(tree / "benchmarks")])
    call, pipe = [sys.executable, "-P", __file__, "--serve"], subprocess.PIPE
    with subprocess.Popen(call, env=os.environ | {"PYTHONPATH": path}, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str], line: str = "") -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(other: Path, repeats: int) -> dict[str, Any]:
    """Both sides in turn, the first one changing."""
    runs: list[dict[str, dict[str, float]]] = []
    with side(ROOT) as this, side(other) as that:
        sides = {"this": this, "other": that}
        names, _ = (answer(process) for process in sides.values())
        for repeat in range(repeats):
            runs.append({name: {} for name in sides})
            for workload in names:
                for name in sorted(sides, reverse=repeat % 2 == 0):
                    runs[-1][name] |= answer(sides[name], workload)
            print(f"{repeat + 1}/{repeats}: { ({k: v['median'] for k, v in _ratios(runs).items()}) }", flush=True)
    return {"ratios": _ratios(runs), "runs": runs}


def _ratios(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of workloads that take more than a millisecond."""
    from harness import spread

    found = {}
    for name in sorted(runs[0]["this"].keys() & runs[0]["other"].keys()):
        if min(runs[0]["this"][name], runs[0]["other"][name]) >= 1e-3:
            ratios = spread(run["this"][name] / run["other"][name] for run in runs)
            found[name] = {key: round(value, 3) for key, value in ratios.items()}
    return found


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    from harness import machine, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        other = Path(directory) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(other), options.commit], check=True, capture_output=True)
        try:
            found = compare(other, options.repeats)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True, capture_output=True)
    said = {"what": __doc__, "machine": machine("cpu"), "commit": options.commit, **found}
    write_json(options.out, said)


if __name__ == "__main__":
    main()
