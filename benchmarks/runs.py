"""Finished runs of the claims, read from their directories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from winnow.record.records import METRICS
from winnow.study.compare_data import RunData, read_run_data
from winnow.study.report_data import merge_steps, read_lines


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

    def series(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]

    def tenths(self, key: str, digits: int) -> list[float]:
        """Means of a metric over each tenth of the steps."""
        values = self.series(key)
        size = max(1, len(values) // 10)
        starts = [*(i * size for i in range(9)), len(values) - size]
        return [round(float(np.mean(values[start : start + size])), digits) for start in starts]

    def share(self, key: str, first: float = 0.0, last: float = 1.0) -> float:
        """A share of the groups rolled out between two fractions of the run, weighted by groups."""
        part = self.rows[int(first * len(self.rows)) : max(1, int(last * len(self.rows)))]
        groups = np.array([row["groups/rolled_out"] for row in part])
        return float(np.sum(groups * [row[key] for row in part]) / np.sum(groups))


def claims(work: Path, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Directory and claim.json of every seed that has finished."""
    for path in sorted(work.glob(f"{name}-s[0-9]*/claim.json")):
        yield path.parent, json.loads(path.read_text(encoding="utf-8"))


def read_runs(work: Path, arms: Sequence[str]) -> dict[str, list[Run]]:
    """Finished runs by arm."""
    runs: dict[str, list[Run]] = {}
    for arm in arms:
        for path, claim in claims(work, arm):
            rows = [row for row in merge_steps(read_lines(path / METRICS, [])) if "updated" in row]
            runs.setdefault(arm, []).append(Run(path, rows, claim))
    return runs
