"""Asynchronous against synchronous training by the clock, on two cores: who is faster, and who waits.

Seconds leave evaluations out, and the steps after each, for which samplers have worked ahead meanwhile.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from families.async_claims import START
from families.base import Arm, Family, Said
from harness import spread
from runs import Run, claims

from winnow.record.records import METRICS

EVAL_STEPS, WORKED_AHEAD = 25, 6
SHARED = ("learning_rate=1e-4", "max_steps=150", f"eval_steps={EVAL_STEPS}")
ARMS = (
    Arm("sync", START.recipe, (*SHARED, "max_lag=0", "threads=1"), START),
    Arm("sync-2-threads", START.recipe, (*SHARED, "max_lag=0", "threads=2"), START),
    Arm("async-1", START.recipe, (*SHARED, "max_lag=1", "threads=1", "sync=processes"), START),
    Arm("async-2", START.recipe, (*SHARED, "max_lag=2", "threads=1", "sync=processes"), START),
    Arm("async-4", START.recipe, (*SHARED, "max_lag=4", "threads=1", "sync=processes"), START),
)


def measured(run: Path) -> dict[str, Any]:
    """Seconds a step; held-out pass@1 by step; mean lag and idle shares."""
    rows = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    timed = [row for row in rows if row["step"] and (row["step"] - 1) % EVAL_STEPS >= WORKED_AHEAD]
    phases = ("seconds/generate", "seconds/update", "seconds/publish")
    found: dict[str, Any] = {
        "seconds a step": statistics.mean(sum(row[phase] for phase in phases) for row in timed),
        "curve": [[row["step"], row["eval/pass@1"]] for row in rows if "eval/pass@1" in row],
    }
    for name in ("lag/mean", "idle/learner", "idle/sampler"):
        values = [row[name] for row in timed if name in row]
        if values:
            found[name] = statistics.mean(values)
    return found


def mean_curve(runs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(step, held-out pass@1), means over seeds."""
    at = zip(*(run["curve"] for run in runs), strict=True)
    return [(points[0][0], statistics.mean(p for _, p in points)) for points in at]


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    """Steps a second as multiples of those of `sync`, seed by seed, and when mean curves come to where `sync` ends."""
    of_arm = {arm.name: [claim for _, claim in claims(work, arm.name)] for arm in ARMS}
    if not of_arm["sync"]:
        return said
    level = statistics.mean(p for _, p in mean_curve(of_arm["sync"])[-3:])
    whole: Said = {"level": level}
    for arm, found in of_arm.items():
        if not found:
            continue
        curve = mean_curve(found)
        seconds = statistics.mean(claim["seconds a step"] for claim in found)
        reached = next((step for step, p in curve if p >= level), None)
        pairs = zip(found, of_arm["sync"], strict=False)
        means = ("seconds a step", "lag/mean", "idle/learner", "idle/sampler")
        whole[arm] = {
            "seeds": len(found),
            "times faster": spread(base["seconds a step"] / claim["seconds a step"] for claim, base in pairs),
            "seconds to the level": None if reached is None else reached * seconds,
            "steps to the level": reached,
            "final pass@1, last three evaluations": statistics.mean(p for _, p in curve[-3:]),
            **{name: statistics.mean(claim[name] for claim in found) for name in means if name in found[0]},
        }
    return whole


def no_tables(said: Said) -> dict[str, str]:
    return {}


FAMILY = Family("async-wall", ARMS, collect, no_tables, jobs=1, more=measured)
