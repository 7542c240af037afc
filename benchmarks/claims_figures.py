"""Figures of the claims runs: read from the run directories, with 95% Student intervals over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from winnow.base.intervals import mean_interval
from winnow.study.compare_data import RunData, read_run_data
from winnow.study.report_data import merge_steps, read_lines


@dataclass(frozen=True)
class Run:
    """One arm, one seed."""

    data: RunData
    rows: list[dict[str, float]]
    """metrics.jsonl, one a training step."""
    deployed: dict[str, float]


Runs = dict[str, dict[int, Run]]
"""By arm, then by seed."""


@dataclass(frozen=True)
class Interval:
    """A mean over `n` seeds with its 95% Student interval (none below three seeds)."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def text(self, form: str = "{:.3f}", scale: float = 1.0) -> str:
        mean = form.format(self.mean * scale)
        if self.low is None or self.high is None:
            return mean
        return f"{mean} ({form.format(self.low * scale)} to {form.format(self.high * scale)})"


def interval(values: Sequence[float]) -> Interval | None:
    """Student's t over seeds, as `winnow compare` has it."""
    if not values:
        return None
    e = mean_interval(values)
    return Interval(e.mean, e.low, e.high, e.n)


def ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Geometric mean of a / b."""
    logs = interval([math.log(a / b) for a, b in pairs])
    if logs is None:
        return None
    bounds = [None if x is None else math.exp(x) for x in (logs.low, logs.high)]
    return Interval(math.exp(logs.mean), bounds[0], bounds[1], logs.n)


def read_runs(work: Path, arms: Sequence[str]) -> tuple[Runs, dict[int, dict[str, float]]]:
    """Every finished run, and the warm starts' figures at deployment sampling by seed."""
    runs: Runs = {}
    for arm in arms:
        for claim in sorted(work.glob(f"{arm}-s[0-9]*/claim.json")):
            said = json.loads(claim.read_text(encoding="utf-8"))
            rows = [r for r in merge_steps(read_lines(claim.parent / "metrics.jsonl", [])) if "updated" in r]
            run = Run(read_run_data(claim.parent), rows, said["deployed"])
            runs.setdefault(arm, {})[int(said["seed"])] = run
    warm = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("warm-s*/claim.json"))]
    return runs, {int(w["seed"]): w["deployed"] for w in warm}


def passed(run: Run) -> float:
    """Held-out pass@1 at the end, at the training temperature."""
    return run.data.curve[-1].passed


def mean_passed(run: Run) -> float:
    """Mean of the held-out pass@1 over all evaluations after the start: how fast, not only how far."""
    return float(np.mean([p.passed for p in run.data.curve[1:]]))


def series(run: Run, key: str) -> list[float]:
    return [row[key] for row in run.rows if key in row]


def tenth(run: Run, key: str, index: int) -> float:
    """Mean of a metric over one tenth of the steps (0 to 9)."""
    values = series(run, key)
    size = max(1, len(values) // 10)
    start = index * size if index < 9 else len(values) - size
    return float(np.mean(values[start : start + size]))


def zero_share(run: Run, first: float, last: float, key: str = "frac_reward_zero_std") -> float:
    """Zero-variance share of the groups rolled out between two fractions of the run, weighted by groups."""
    part = run.rows[int(first * len(run.rows)) : max(1, int(last * len(run.rows)))]
    groups = np.array([row["groups/rolled_out"] for row in part])
    return float(np.sum(groups * [row[key] for row in part]) / np.sum(groups))


def swing(run: Run) -> float:
    """Standard deviation of the zero-variance share's ten-step means over the second half: how much it oscillates."""
    values = series(run, "frac_reward_zero_std")
    late = values[len(values) // 2 :]
    means = [float(np.mean(late[i : i + 10])) for i in range(0, len(late) - 9, 10)]
    return float(np.std(means))


def fired_at(run: Run) -> int | None:
    """The first step with larger groups than the first."""
    sizes = series(run, "groups/size_mean")
    return next((i for i, size in enumerate(sizes) if size > sizes[0]), None)


def around_firing(run: Run, width: int = 20) -> tuple[float, float] | None:
    """Mean zero-variance share before the group size rose, and over `width` steps after."""
    at = fired_at(run)
    if not at:
        return None
    values = series(run, "frac_reward_zero_std")
    return float(np.mean(values[max(0, at - width) : at])), float(np.mean(values[at : at + width]))


def summary(run: Run) -> dict[str, Any]:
    """What the JSON file keeps of one run."""
    deployed = {k: run.deployed[k] for k in ("pass@1", "pass@16", "greedy")}
    return {
        "seed": run.data.seed,
        "pass@1": passed(run),
        "mean_pass@1": mean_passed(run),
        "pass_at": run.data.pass_at,
        "tokens": run.data.tokens,
        "rollouts": run.data.rollouts,
        "zero_variance_by_tenth": [round(tenth(run, "frac_reward_zero_std", i), 4) for i in range(10)],
        "easy": zero_share(run, 0.5, 1, "frac_zero_easy"),
        "hard": zero_share(run, 0.5, 1, "frac_zero_hard"),
        "grad_norm": float(np.mean(series(run, "grad_norm"))),
        "grad_norm_by_tenth": [round(tenth(run, "grad_norm", i), 4) for i in range(10)],
        "p_easy": run.rows[-1].get("greso/p_easy"),
        "p_hard": run.rows[-1].get("greso/p_hard"),
        "eta_eff_by_tenth": [round(tenth(run, "eta_eff", i), 8) for i in range(10)],
        "size_rose_at_step": fired_at(run),
        "zero_variance_around": around_firing(run),
        "swing": swing(run),
        "deployed": deployed | {"diversity_ratio": deployed["pass@16"] / deployed["pass@1"]},
        "curve": [[p.step, p.tokens, p.rollouts, round(p.passed, 5)] for p in run.data.curve],
    }
