"""Asynchronous against synchronous training by the clock, on two cores: who is faster, and who waits.

Runs follow one another (nothing else should run), all arms of a seed before the next seed. Seconds leave evaluations
out, and the steps after each, for which samplers have worked ahead meanwhile. What is finished is not done again.

    python benchmarks/async_wall.py --out benchmarks/results/async_wall.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from arms import ROOT, Arm, run_all, train, write_json

RECIPE = "countdown-lag"
EVAL_STEPS, WORKED_AHEAD = 25, 6
SHARED = ("learning_rate=1e-4", "max_steps=150", f"eval_steps={EVAL_STEPS}")
ARMS = {
    "sync": Arm("sync", RECIPE, (*SHARED, "max_lag=0", "threads=1")),
    "sync-2-threads": Arm("sync-2-threads", RECIPE, (*SHARED, "max_lag=0", "threads=2")),
    "async-1": Arm("async-1", RECIPE, (*SHARED, "max_lag=1", "threads=1", "sync=processes")),
    "async-2": Arm("async-2", RECIPE, (*SHARED, "max_lag=2", "threads=1", "sync=processes")),
    "async-4": Arm("async-4", RECIPE, (*SHARED, "max_lag=4", "threads=1", "sync=processes")),
}


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _claim(run: Path) -> dict[str, Any]:
    """Seconds a step; held-out pass@1 by step; mean lag and idle shares."""
    rows = _rows(run)
    timed = [row for row in rows if row["step"] and (row["step"] - 1) % EVAL_STEPS >= WORKED_AHEAD]
    phases = [f"seconds/{phase}" for phase in ("generate", "update", "publish")]
    names = ("lag/mean", "idle/learner", "idle/sampler")
    found = {name: [row[name] for row in timed if name in row] for name in names}
    return {
        "seconds a step": statistics.mean(sum(row[phase] for phase in phases) for row in timed),
        "curve": [[row["step"], row["eval/pass@1"]] for row in rows if "eval/pass@1" in row],
        **{name: statistics.mean(values) for name, values in found.items() if values},
    }


def _figures(work: Path) -> dict[str, Any]:
    """Steps a second as multiples of those of `sync`, seed by seed, and when mean curves come to where `sync` ends."""
    claims = {}
    for arm in ARMS:
        files = sorted(work.glob(f"{arm}-s[0-9]/claim.json"))
        if files:
            claims[arm] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    curves = {arm: _mean_curve(runs) for arm, runs in claims.items()}
    level = statistics.mean(p for _, p in curves["sync"][-3:])
    found: dict[str, Any] = {"level": level}
    for arm, runs in claims.items():
        ratios = [b["seconds a step"] / a["seconds a step"] for a, b in zip(runs, claims["sync"], strict=False)]
        seconds = statistics.mean(r["seconds a step"] for r in runs)
        reached = next((step for step, p in curves[arm] if p >= level), None)
        means = {name: statistics.mean(r[name] for r in runs) for name in runs[0] if name not in ("curve",)}
        found[arm] = {
            "seeds": len(runs),
            "times faster": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            "seconds to the level": None if reached is None else reached * seconds,
            "steps to the level": reached,
            "final pass@1, last three evaluations": statistics.mean(p for _, p in curves[arm][-3:]),
            **means,
        }
    return found


def _mean_curve(runs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(step, held-out pass@1), means over seeds."""
    at = zip(*(run["curve"] for run in runs), strict=True)
    return [(points[0][0], statistics.mean(p for _, p in points)) for points in at]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "async-wall")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        if options.one[0] == "warm":
            from async_claims import warm_model

            warm_model(int(options.one[1]), options.work)
        else:
            run = train(ARMS[options.one[0]], int(options.one[1]), options.work)
            write_json(run / "claim.json", _claim(run))
        return
    run_all(__file__, [["warm"], options.arms], options.seeds, options.work, 1)
    figures = _figures(options.work)
    print(json.dumps(figures, indent=1))
    if options.out:
        write_json(options.out, figures)


if __name__ == "__main__":
    main()
