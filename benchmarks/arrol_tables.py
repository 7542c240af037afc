"""Tables of ARRoL's claims, from the run directories of `arrol_claims.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import claims_figures as f
import numpy as np
from arms import fill, table
from claims_figures import Run, Runs, interval
from claims_tables import percent, text

GATE = "gate/arrol/"
COLD_STEPS = 20
LEVEL = 0.75
COLUMNS = ("keep_rate", "success", "balance", "brier", "auroc", "accuracy")


def write_figures(work: Path, arms: Mapping[str, Sequence[str]], *, out: Path | None, docs: Path | None) -> None:
    """`arms`: task -> names. Arms without a finished run are left out."""
    said: dict[str, Any] = {}
    tables: dict[str, str] = {}
    for task, names in arms.items():
        runs, _ = f.read_runs(work, names)
        runs = {name.removeprefix(f"{task}-"): by_seed for name, by_seed in runs.items()}
        if "grpo" not in runs:
            continue
        votes = votes_of(work, f"{task}-arrol")
        said[task] = {
            "runs": {a: [_summary(r) for r in by_seed.values()] for a, by_seed in runs.items()},
            "votes": votes,
        }
        tables[f"arrol-{task}"] = main_table(runs)
        tables[f"arrol-{task}-gate"] = gate_table(runs)
        tables[f"arrol-{task}-votes"] = vote_table(votes)
    if out is not None:
        out.write_text(json.dumps(said, indent=1), encoding="utf-8")
    if docs is not None:
        fill(docs, tables)


def main_table(runs: Runs) -> str:
    rows = []
    for arm, by_seed in runs.items():
        base = runs["dapo"] if arm.startswith("dapo") and "dapo" in runs else runs["grpo"]
        rows.append(
            [
                arm,
                str(len(by_seed)),
                text(f.over_seeds(by_seed, lambda r: r.deployed["pass@1"])),
                text(f.difference(by_seed, base, lambda r: r.deployed["pass@1"]), "{:+.3f}"),
                text(f.over_seeds(by_seed, lambda r: r.deployed["greedy"])),
                text(f.cost_ratio(by_seed, base, lambda r: r.data.tokens), "{:.2f}"),
                text(f.cost_ratio(base, by_seed, lambda r: _seconds(r, "generate")), "{:.2f}"),
                text(f.cost_ratio(base, by_seed, lambda r: _seconds(r, "update")), "{:.2f}"),
                text(f.cost_ratio(base, by_seed, lambda r: _seconds(r, "generate") + _seconds(r, "update")), "{:.2f}"),
                _to_level(base, by_seed),
            ]
        )
    head = [
        "arm",
        "seeds",
        "final pass@1",
        "difference",
        "greedy",
        "tokens",
        "generation, times faster",
        "update",
        "both",
    ]
    return table([*head, f"time to {LEVEL:.0%} of the base's gain, times shorter"], rows)


def _to_level(base: dict[int, Run], by_seed: dict[int, Run]) -> str:
    """How many times earlier the mean curve has made `LEVEL` of the gain in held-out pass@1 that the base makes."""
    _, target = _mean_curve(base)
    level = target[0] + LEVEL * (target[-1] - target[0])
    reached = [_crossing(*_mean_curve(runs), level) for runs in (base, by_seed)]
    return "never" if reached[0] is None or reached[1] is None else f"{reached[0] / reached[1]:.2f}"


def _mean_curve(runs: dict[int, Run]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of generation and update at each evaluation (a median step's times the steps), and held-out pass@1."""
    curves = [[p.passed for p in run.data.curve] for run in runs.values()]
    steps = np.array([p.step for p in next(iter(runs.values())).data.curve], dtype=np.float64)
    seconds = np.mean([_seconds(run, "generate") + _seconds(run, "update") for run in runs.values()])
    return steps * seconds, np.maximum.accumulate(np.mean(curves, axis=0))


def _crossing(axis: np.ndarray, values: np.ndarray, level: float) -> float | None:
    """Where the rising curve first is at `level`, by linear interpolation."""
    if values[-1] < level:
        return None
    i = int(np.argmax(values >= level))
    if i == 0:
        return float(axis[0])
    share = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(axis[i - 1] + share * (axis[i] - axis[i - 1]))


def gate_table(runs: Runs) -> str:
    """After the cold start; shares are means over steps."""
    rows = []
    for arm, by_seed in runs.items():
        gate = [f.over_seeds(by_seed, lambda r, c=c: _mean(r, GATE + c)) for c in COLUMNS]
        seen = [f.over_seeds(by_seed, lambda r, c=c: _mean(r, c)) for c in ("reward", "frac_reward_zero_std")]
        rows.append([arm, *("" if c is None else text(c, "{:.3f}") for c in (*seen, *gate))])
    head = [
        "arm",
        "right, of those trained",
        "groups without signal",
        "keep rate",
        "right, of all",
        "p (1 - p)",
        "Brier",
    ]
    return table([*head, "AUROC", "accuracy"], rows)


def votes_of(work: Path, arm: str) -> list[dict[str, Any]]:
    claims = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(work.glob(f"{arm}-s[0-9]*/claim.json"))]
    return [claim["votes"]["votes"] | {"pass@1": claim["votes"]["pass@1"]} for claim in claims]


def vote_table(votes: list[dict[str, Any]]) -> str:
    rows = []
    for name in (key for key in (votes[0] if votes else {}) if key != "pass@1"):
        share = interval([v[name]["share"] for v in votes])
        gain = interval([v[name]["share"] - v["majority"]["share"] for v in votes])
        rows.append([name, percent(share), "" if name == "majority" else text(gain, "{:+.1f}", 100)])
    return table(["weights", "maj@32", "points over majority"], rows)


def _mean(run: Run, key: str) -> float | None:
    """Over the steps after the cold start."""
    rows = [row[key] for row in run.rows if row["step"] > COLD_STEPS and key in row]
    return float(np.mean(rows)) if rows else None


def _seconds(run: Run, phase: str) -> float:
    """Of a median step."""
    return float(np.median([row[f"seconds/{phase}"] for row in run.rows]))


def _summary(run: Run) -> dict[str, Any]:
    return {
        "seed": run.data.seed,
        "deployed": {key: value for key, value in run.deployed.items() if key != "model"},
        "tokens": run.data.tokens,
        "seconds": {phase: _seconds(run, phase) for phase in ("generate", "update")},
        "trained": {key: _mean(run, key) for key in ("reward", "frac_reward_zero_std")},
        "gate": {key: _mean(run, GATE + key) for key in COLUMNS},
        "curve": [[p.step, p.tokens, p.rollouts, round(p.passed, 5)] for p in run.data.curve],
    }
