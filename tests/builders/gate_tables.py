"""Write tables of recorded groups, and call `winnow gate` on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet
from typer.testing import CliRunner

from winnow.cli.main import app
from winnow.methods.gate.signals import SIGNALS

SEVEN = list(SIGNALS)
T_MAX = 30


def make_rows(n: int = 40, ks: tuple[int, ...] = (10, 15), seed: int = 0) -> list[dict[str, Any]]:
    """Groups of which the converged ones are mostly zero-variance; values on a grid, so that there are ties."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        zero = bool(rng.random() < 0.4)
        var = 0.0 if zero else float(rng.choice([0.109375, 0.1875, 0.25]))
        label = ("all_fail" if rng.random() < 0.6 else "all_succeed") if zero else "mixed"
        steps = int(rng.integers(100, 240))
        for k in ks:
            values = {s: round(float(np.clip(rng.normal(0.2 if zero else 0.5, 0.2), 0, 1)), 1) for s in SEVEN}
            shared = {"K": k, "task_id": f"t{i}", "task_type": "abc"[i % 3], "label": label, "reward_var": var}
            rows.append(shared | values | {"steps": steps, "steps_k": min(8 * k, steps)})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    (parquet.write_table if path.suffix == ".parquet" else csv.write_csv)(table, path)
    return path


def without(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in names} for row in rows]


def weighted(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows with weights 1 to 4, and the table in which every group is there as often as it weighs."""
    heavy = [r | {"weight": 1 + int(r["task_id"][1:]) % 4} for r in rows]
    return heavy, [r | {"task_id": f"{r['task_id']}.{i}"} for r in heavy for i in range(r["weight"])]


def same(a: Any, b: Any) -> None:
    for name in vars(a):
        x, y = getattr(a, name), getattr(b, name)
        assert x == y or (x is not None and math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12)), (name, x, y)


def command(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, ["gate", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
