"""The mid-trajectory gate in small ALFWorld rooms: training with it, without it, and with as many random cuts.

The gates are those that `winnow gate calibrate` found on 256 groups of the starting model with a precision of 0.8.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tables as t
from families.base import Arm, Family, Said, Start
from runs import Run, claims
from tables import SEEDS, Column, Figures, Summary

from winnow.record.records import GATE
from winnow.study.report_data import read_lines

RECIPE = "alfworld"
START = Start(
    RECIPE,
    {"max_steps": 250, "batch_size": 48, "learning_rate": 2e-3, "num_layers": 2, "max_positions": 1024},
    shared=True,
)
"""As in the paper, all seeds start from the same model."""
K = 4
"""The step at which the gate by edit distance is asked."""
BY_DISTANCE = f"name: divergence, signal: prefix_edit_distance, k: {K}, threshold: 0.12"
BY_PROGRESS = "gates=[{name: divergence, k: 8, threshold: 0.0, progress: 0.5}]"
RANDOM = "gates=[{name: random, k: 8, share: 0.393}]"
"""Cuts as many groups as that by progress, at the same step."""
GATED, WITHOUT_ZERO = f"gates=[{{{BY_DISTANCE}}}]", "filter={name: zero_variance, refill: false}"
ARMS = (
    Arm("grpo", RECIPE, (), START),
    Arm("gate", RECIPE, (GATED,), START),
    Arm("gate-progress", RECIPE, (BY_PROGRESS,), START),
    Arm("dapo", RECIPE, (WITHOUT_ZERO,), START),
    Arm("random-cut", RECIPE, (RANDOM,), START),
    Arm("gate-dapo", RECIPE, (GATED, WITHOUT_ZERO), START),
    Arm("gate-or", RECIPE, (f"gates=[{{{BY_DISTANCE}, termination: 0.9}}]",), START),
)

# ---- figures of a run --------------------------------------------------------------------------------------------


def cut(row: dict[str, float]) -> float:
    """Groups that gates cut in a step."""
    return sum(row[key] * row[key.replace("cut_share", "asked")] for key in row if key.endswith("/cut_share"))


def cut_share(run: Run) -> float:
    """Of the groups that were rolled out."""
    return sum(cut(row) for row in run.rows) / sum(run.series("groups/rolled_out"))


def zero_of_rest(run: Run) -> float:
    """Zero-variance share of the groups that were not cut.

    What `divergence` cuts is counted as zero-variance, and what is cut at random is not judged.
    """
    judged = np.array([row["groups/judged"] for row in run.rows])
    zero = judged * [row.get("frac_reward_zero_std", 0.0) for row in run.rows]
    counted = sum(cut(row) for row in run.rows if "gate/divergence/cut_share" in row)
    return float((zero.sum() - counted) / (judged.sum() - counted))


def oracle_steps(run: Run) -> float | None:
    """Environment steps that are left when every zero-variance group is stopped at step `K`; None with gates."""
    rows = [row for row in read_lines(run.path / GATE, []) if row["K"] == K]
    if not rows:
        return None
    left = [row["steps_k"] if row["reward_var"] == 0 else row["steps"] for row in rows]
    return float(sum(left) / sum(row["steps"] for row in rows))


def summary(run: Run) -> Summary:
    """`teaching`: share of a batch's groups whose advantages are not all zero."""
    filtered = "zero_variance" in str(run.data.config["filter"])
    return {
        "seed": run.seed,
        "deployed": run.deployed,
        "tokens": run.data.tokens,
        "cut_share": cut_share(run),
        "zero_share": zero_of_rest(run),
        "teaching": 1.0 if filtered else 1 - zero_of_rest(run),
        "oracle_steps": oracle_steps(run),
        "grad_norm": float(np.mean(run.series("grad_norm"))),
        "curve": run.curve,
        "cut_by_step": [round(cut(row) / max(row["groups/rolled_out"], 1), 4) for row in run.rows],
        "zero_by_step": [round(row.get("frac_reward_zero_std", 0.0), 4) for row in run.rows],
    }


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    starts = dict(said.get("warm start", {}))
    for _, claim in claims(work, START.name):
        starts[str(claim["seed"])] = {key: value for key, value in claim["deployed"].items() if key != "model"}
    new = {arm: [summary(run) for run in found] for arm, found in runs.items()}
    merged = t.merged(said.get("runs", {}), new, [arm.name for arm in ARMS])
    return said | {"warm start": starts, "runs": merged}


# ---- table and picture -------------------------------------------------------------------------------------------


def tokens_to_the_end_of_base(runs: list[Summary], base: list[Summary]) -> str:
    """Where the mean curve over seeds first is at the baseline's mean end; single curves are too rough for that."""
    pairs = t.paired(runs, base)
    own, others = (t.mean_curve([pair[i] for pair in pairs]).tolist() for i in (0, 1))
    costs = [t.cost_to(curve, others[-1][3], "tokens") for curve in (own, others)]
    return "not reached" if costs[0] is None or not costs[1] else f"{costs[0] / costs[1]:.2f}"


COLUMNS = (
    SEEDS,
    t.mean("final pass@1", "deployed.pass@1"),
    t.difference("difference", "deployed.pass@1"),
    t.mean("greedy", "deployed.greedy"),
    t.ratio("tokens", "tokens"),
    Column("tokens to the baseline's end (mean curves)", tokens_to_the_end_of_base),
    t.share("groups cut", "cut_share"),
    t.share("zero-variance of the rest", "zero_share"),
    t.ratio("gradient norm", "grad_norm", own=False),
    t.ratio("predicted", "teaching", own=False),
)


def tables(said: Said) -> dict[str, str]:
    runs: Figures = said["runs"]
    table = t.table_of(runs, COLUMNS, base="grpo")
    oracle = t.over_seeds(runs.get("grpo", []), "oracle_steps")
    if oracle is not None:
        row = ["oracle", str(oracle.n), *["as grpo"] * 3, t.text(oracle, t.TWO), *[""] * 5]
        table += "| " + " | ".join(row) + " |\n"
    return {"gate-tier-3": table}


def draw(said: Said, path: Path) -> None:
    """Held-out success against sampled tokens, and the groups cut with the baseline's zero-variance groups."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs: Figures = said["runs"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for arm, found in runs.items():
        _, tokens, _, passed = t.mean_curve(found).T
        left.plot(tokens / 1e3, passed, marker="o", ms=3, label=f"{arm} (n={len(found)})")
    left.set(xlabel="sampled tokens, thousands", ylabel="held-out pass@1 (128 games)")
    lines = (
        ("grpo", "zero_by_step", "zero-variance groups, baseline"),
        ("gate", "cut_by_step", "cut by the gate"),
        ("gate-progress", "cut_by_step", "cut by progress"),
    )
    for arm, key, what in lines:
        shares = [run[key] for run in runs.get(arm, []) if key in run]
        if shares and len(shares[0]) >= 5:
            right.plot(np.convolve(np.mean(shares, axis=0), np.ones(5) / 5, "valid"), label=what)
    right.set(xlabel="step", ylabel="share of the groups (5-step mean)", ylim=(0, 1))
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


FAMILY = Family("gate-claims", ARMS, collect, tables, draw)
