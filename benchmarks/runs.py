"""Finished runs of the claims, read from their directories, and the figures that JSON files keep of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from winnow.record.records import METRICS
from winnow.study.compare_data import RunData, read_run_data
from winnow.study.report_data import merge_steps, read_lines

PAID = ("generate", "update", "reuse")
"""Parts of a step whose seconds count; evaluations and checkpoints do not."""


@dataclass(frozen=True)
class Run:
    """One arm, one seed."""

    path: Path
    rows: list[dict[str, float]]
    """metrics.jsonl, one a training step."""
    claim: dict[str, Any]

    @cached_property
    def data(self) -> RunData:
        """As `winnow compare` has it; raises ConfigError when the run was never evaluated."""
        return read_run_data(self.path)

    @property
    def seed(self) -> int:
        return int(self.claim["seed"])

    @property
    def deployed(self) -> dict[str, Any]:
        """Figures of the evaluation at the end, without the model's directory."""
        return {key: value for key, value in self.claim["deployed"].items() if key != "model"}

    @property
    def curve(self) -> list[list[float]]:
        """Step, tokens, rollouts and pass@1 of each evaluation."""
        return [[p.step, p.tokens, p.rollouts, round(p.passed, 5)] for p in self.data.curve]

    def series(self, key: str, after: int = 0) -> list[float]:
        """A metric by step, from the first step after so many."""
        return [row[key] for row in self.rows if key in row and row["step"] > after]

    def tenths(self, key: str, digits: int) -> list[float]:
        """Means of a metric over each tenth of the steps."""
        values = self.series(key)
        size = max(1, len(values) // 10)
        starts = [*(i * size for i in range(9)), len(values) - size]
        return [round(float(np.mean(values[start : start + size])), digits) for start in starts]

    def share(self, key: str, first: float = 0.0) -> float:
        """A share of the groups rolled out after a fraction of the run, weighted by groups."""
        part = self.rows[int(first * len(self.rows)) :]
        groups = np.array([row["groups/rolled_out"] for row in part])
        return float(np.sum(groups * [row.get(key, 0.0) for row in part]) / np.sum(groups))


def summary(run: Run, *, decoded: bool = False) -> dict[str, Any]:
    """What every family keeps of a run. `decoded`: its tokens are those that took a decoding step, not all sampled.

    `computed` also counts prompts and drafts; None: not recorded."""
    spared = {0: 0.0}
    at_step = {0: 0.0}
    seconds = 0.0
    for row in run.rows:
        seconds += sum(row.get(f"seconds/{part}", 0.0) for part in PAID)
        at_step[int(row["step"])] = seconds
        spared[int(row["step"])] = row["num_tokens"] - row["num_decoded_tokens"] if decoded else 0.0
    passed = [point.passed for point in run.data.curve]
    found = {
        "seed": run.seed,
        "pass@1": passed[-1],
        "best": max(passed),
        "mean_pass@1": float(np.mean(passed[1:])),
        "pass_at": run.data.pass_at,
        "tokens": run.data.tokens - max(spared.values()),
        "accepted": max(spared.values()),
        "computed": run.rows[-1].get("num_computed_tokens"),
        "rollouts": run.data.rollouts,
        "seconds": seconds,
        "seconds_at": [round(at_step[point.step], 1) for point in run.data.curve],
        "sampled_at": [point.tokens for point in run.data.curve],
        "zero_variance": run.share("frac_reward_zero_std"),
        "zero_variance_by_tenth": run.tenths("frac_reward_zero_std", 4),
        "deployed": run.deployed,
        "curve": [[step, tokens - spared[int(step)], *rest] for step, tokens, *rest in run.curve],
    }
    return found | ({"votes": run.claim["votes"]["votes"]} if "votes" in run.claim else {})


def metrics_of(
    run: Run, keys: Sequence[str], after: int = 0, middle: Callable[[list[float]], Any] = np.mean
) -> dict[str, float]:
    """Middles of metrics over the steps after so many, of those that the run has."""
    series = {key: run.series(key, after) for key in keys}
    return {key: float(middle(values)) for key, values in series.items() if values}


def read_runs(work: Path, arms: Sequence[str]) -> dict[str, list[Run]]:
    """Finished runs by arm: those that have left a claim.json."""
    runs: dict[str, list[Run]] = {}
    for arm in arms:
        for file in sorted(work.glob(f"{arm}-s[0-9]*/claim.json")):
            rows = [row for row in merge_steps(read_lines(file.parent / METRICS, [])) if "updated" in row]
            claim = json.loads(file.read_text(encoding="utf-8"))
            runs.setdefault(arm, []).append(Run(file.parent, rows, claim))
    return runs
