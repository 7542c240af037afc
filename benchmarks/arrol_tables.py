"""Tables of ARRoL's claims, from the run directories of `arrol_claims.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import claims_figures as f
import numpy as np
import summaries as sm
from arms import fill, table
from claims_figures import Run, interval
from claims_tables import percent, text
from summaries import Figures, Summary

GATE = "gate/arrol/"
COLD_STEPS = 20
LEVEL = 0.75
COLUMNS = ("keep_rate", "success", "balance", "brier", "auroc", "accuracy")


def write_figures(work: Path, arms: Mapping[str, Sequence[str]], *, out: Path | None, docs: Path | None) -> None:
    """`arms`: task -> names. What is not in `work` is as it was in `out`, or left out.

    Seconds are kept of runs that ran beside those of `grpo`; others say nothing about speed.
    """
    said: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    tables: dict[str, str] = {}
    for task, names in arms.items():
        found, _ = f.read_runs(work, names)
        timed = f"{task}-grpo" in found
        new = {name.removeprefix(f"{task}-"): [_summary(r, timed) for r in found[name].values()] for name in found}
        kept = said.get(task, {"runs": {}, "votes": []})
        runs = sm.merged(kept["runs"], new, [name.removeprefix(f"{task}-") for name in names])
        if "grpo" not in runs:
            continue
        said[task] = {"runs": runs, "votes": votes_of(work, f"{task}-arrol") or kept["votes"]}
        tables[f"arrol-{task}"] = main_table(runs)
        tables[f"arrol-{task}-gate"] = gate_table(runs)
        tables[f"arrol-{task}-votes"] = vote_table(said[task]["votes"])
    if out is not None:
        out.write_text(json.dumps(said, indent=1), encoding="utf-8")
    if docs is not None:
        fill(docs, tables)


def main_table(runs: Figures) -> str:
    rows = []
    for arm, found in runs.items():
        base = runs["dapo"] if arm.startswith("dapo") and "dapo" in runs else runs["grpo"]
        timed = all(run["seconds"] for run in (*base, *found))
        rows.append(
            [
                arm,
                str(len(found)),
                text(sm.over_seeds(found, sm.passed)),
                text(sm.difference(found, base, sm.passed), "{:+.3f}"),
                text(sm.over_seeds(found, lambda r: r["deployed"]["greedy"])),
                text(sm.ratio(found, base, lambda r: r["tokens"]), "{:.2f}"),
                text(sm.ratio(base, found, lambda r: r["seconds"]["generate"]), "{:.2f}") if timed else "",
                text(sm.ratio(base, found, lambda r: r["seconds"]["update"]), "{:.2f}") if timed else "",
                text(sm.ratio(base, found, _both), "{:.2f}") if timed else "",
                _to_level(base, found) if timed else "",
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


def _to_level(base: list[Summary], found: list[Summary]) -> str:
    """How many times earlier the mean curve has made `LEVEL` of the gain in held-out pass@1 that the base makes."""
    _, target = _rising_curve(base)
    level = target[0] + LEVEL * (target[-1] - target[0])
    reached = [_crossing(*_rising_curve(runs), level) for runs in (base, found)]
    return "never" if reached[0] is None or reached[1] is None else f"{reached[0] / reached[1]:.2f}"


def _rising_curve(found: list[Summary]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of generation and update at each evaluation (a median step's times the steps), and held-out pass@1."""
    curve = sm.mean_curve(found)
    return curve[:, 0] * np.mean([_both(run) for run in found]), np.maximum.accumulate(curve[:, 3])


def _both(run: Summary) -> float:
    return float(run["seconds"]["generate"] + run["seconds"]["update"])


def _crossing(axis: np.ndarray, values: np.ndarray, level: float) -> float | None:
    """Where the rising curve first is at `level`, by linear interpolation."""
    if values[-1] < level:
        return None
    i = int(np.argmax(values >= level))
    if i == 0:
        return float(axis[0])
    share = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(axis[i - 1] + share * (axis[i] - axis[i - 1]))


def gate_table(runs: Figures) -> str:
    """After the cold start; shares are means over steps."""
    rows = []
    for arm, found in runs.items():
        seen = [sm.over_seeds(found, lambda r, k=k: r["trained"][k]) for k in ("reward", "frac_reward_zero_std")]
        gate = [sm.over_seeds(found, lambda r, c=c: r["gate"][c]) for c in COLUMNS]
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
    return [claim["votes"]["votes"] | {"pass@1": claim["votes"]["pass@1"], "seed": claim["seed"]} for claim in claims]


def vote_table(votes: list[dict[str, Any]]) -> str:
    rows = []
    for name in (key for key in (votes[0] if votes else {}) if key not in ("pass@1", "seed")):
        share = interval([v[name]["share"] for v in votes])
        gain = interval([v[name]["share"] - v["majority"]["share"] for v in votes])
        rows.append([name, percent(share), "" if name == "majority" else text(gain, "{:+.1f}", 100)])
    return table(["weights", "maj@32", "points over majority"], rows)


def gate_figures(run: Run, after: int) -> dict[str, dict[str, float | None]]:
    """Means over the steps after that many: of what was trained, and of the gate."""
    return {
        "trained": {key: _mean(run, key, after) for key in ("reward", "frac_reward_zero_std")},
        "gate": {key: _mean(run, GATE + key, after) for key in COLUMNS},
    }


def _mean(run: Run, key: str, after: int) -> float | None:
    rows = [row[key] for row in run.rows if row["step"] > after and key in row]
    return float(np.mean(rows)) if rows else None


def _seconds(run: Run, phase: str) -> float:
    """Of a median step."""
    return float(np.median([row[f"seconds/{phase}"] for row in run.rows]))


def _summary(run: Run, timed: bool) -> dict[str, Any]:
    return {
        "seed": run.data.seed,
        "deployed": {key: value for key, value in run.deployed.items() if key != "model"},
        "tokens": run.data.tokens,
        "seconds": {phase: _seconds(run, phase) for phase in ("generate", "update")} if timed else None,
        **gate_figures(run, after=COLD_STEPS),
        "curve": [[p.step, p.tokens, p.rollouts, round(p.passed, 5)] for p in run.data.curve],
    }
