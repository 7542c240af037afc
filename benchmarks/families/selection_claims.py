"""GRESO, Active-RLOO, Adaptive-K and all together on Countdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tables as t
from families.base import Arm, Family, Said, Start
from runs import Run, claims
from tables import SEEDS, TWO, Column, Figures, Summary

DEPLOYMENT = {
    "eval_temperature": 0.6,
    "eval_top_p": 0.95,
    "eval_top_k": 20,
    "eval_generations": 16,
    "eval_prompts": 256,
}
"""Active-RLOO's deployment sampling (section 4.4), on all held-out puzzles."""
START = Start("countdown-uniform", {"max_steps": 270})
G8 = ("num_generations=8",)
MORE_PROMPTS = ("env.train_size=4096",)
DISCARD = ("rollout_batch.surplus=discard",)
TWO_WAY = ("group_size.tau=0.6", "group_size.tau_down=0.4", "group_size.dwell=20")
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dapo-fixed": ("countdown-dapo", ("rollout_batch.name=fixed", *DISCARD)),
    "dapo": ("countdown-dapo", ()),
    "dapo-adaptive": ("countdown-dapo", ("rollout_batch.name=adaptive", *DISCARD)),
    "greso": ("countdown-greso", ()),
    "uniform": ("countdown-uniform", ()),
    "active": ("countdown-active", ()),
    "active-adaptive-k": ("countdown-active-adaptive-k", ()),
    "active-band": ("countdown-active", ()),
    "active-adaptive-k-band": ("countdown-active-adaptive-k", ()),
    "lr-const-2x": ("countdown-lr-const-2x", ()),
    "lr-ramp": ("countdown-lr-ramp", ()),
    "all": ("countdown-all", ()),
    "all-two-way": ("countdown-all", TWO_WAY),
    "uniform-g8": ("countdown-uniform", G8),
    "max-at-4-g8": ("countdown-uniform", (*G8, "advantage={name: max_at_k, k: 4}")),
    "backoff": ("countdown-greso", ("selector=backoff",)),
    "greso-target-0": ("countdown-greso", ("selector.target=0",)),
    "greso-target-50": ("countdown-greso", ("selector.target=0.5",)),
    "greso-target-100": ("countdown-greso", ("selector.target=1",)),
    "greso-exact": ("countdown-greso", ("rollout_batch=exact", "max_lag=0")),
    "dapo-fixed-4096": ("countdown-dapo", ("rollout_batch.name=fixed", *DISCARD, *MORE_PROMPTS)),
    "greso-4096": ("countdown-greso", MORE_PROMPTS),
    "all-4096": ("countdown-all", MORE_PROMPTS),
}
"""Those that end with `-band` leave out what the start solves always or never (Active-RLOO, section 4.1)."""

GRESO = ("dapo-fixed", "dapo-adaptive", "dapo", "greso", "greso-exact")
GRESO_4096 = ("dapo-fixed-4096", "greso-4096", "all-4096")
TARGETS = ("greso-target-0", "greso", "greso-target-50", "greso-target-100", "backoff", "dapo")
ACTIVE = ("uniform", "active", "lr-const-2x", "lr-ramp", "active-adaptive-k")
BANDED = ("uniform", "active", "active-band", "active-adaptive-k", "active-adaptive-k-band")
COMPOSED = ("dapo-fixed", "dapo", "greso", "uniform", "active", "active-adaptive-k", "all", "all-two-way")
LINES = {
    "GRESO": ("dapo-fixed", "dapo", "dapo-adaptive", "greso"),
    "Active-RLOO": ("uniform", "active", "active-adaptive-k", "lr-const-2x", "lr-ramp"),
    "composed": ("dapo", "uniform", "all", "all-two-way"),
}
"""Of the picture."""

# ---- figures of a run --------------------------------------------------------------------------------------------


def swing(run: Run) -> float:
    """Standard deviation of the zero-variance share's ten-step means over the second half: how much it oscillates."""
    values = run.series("frac_reward_zero_std")
    late = values[len(values) // 2 :]
    means = [float(np.mean(late[i : i + 10])) for i in range(0, len(late) - 9, 10)]
    return float(np.std(means))


def fired_at(run: Run) -> int | None:
    """The first step with larger groups than the first."""
    sizes = run.series("groups/size_mean")
    return next((i for i, size in enumerate(sizes) if size > sizes[0]), None)


def around_firing(run: Run, width: int = 20) -> tuple[float, float] | None:
    """Mean zero-variance share before the group size rose, and over `width` steps after."""
    at = fired_at(run)
    if not at:
        return None
    values = run.series("frac_reward_zero_std")
    return float(np.mean(values[max(0, at - width) : at])), float(np.mean(values[at : at + width]))


def summary(run: Run) -> Summary:
    deployed = {k: run.deployed[k] for k in ("pass@1", "pass@16", "greedy")}
    passed = [p.passed for p in run.data.curve]
    return {
        "seed": run.seed,
        "pass@1": passed[-1],
        "mean_pass@1": float(np.mean(passed[1:])),
        "pass_at": run.data.pass_at,
        "tokens": run.data.tokens,
        "rollouts": run.data.rollouts,
        "zero_variance_by_tenth": run.tenths("frac_reward_zero_std", 4),
        "easy": run.share("frac_zero_easy", 0.5),
        "hard": run.share("frac_zero_hard", 0.5),
        "grad_norm": float(np.mean(run.series("grad_norm"))),
        "grad_norm_by_tenth": run.tenths("grad_norm", 4),
        "p_easy": run.rows[-1].get("greso/p_easy"),
        "p_hard": run.rows[-1].get("greso/p_hard"),
        "eta_eff_by_tenth": run.tenths("eta_eff", 8),
        "size_rose_at_step": fired_at(run),
        "zero_variance_around": around_firing(run),
        "swing": swing(run),
        "deployed": deployed | {"diversity_ratio": deployed["pass@16"] / deployed["pass@1"]},
        "curve": run.curve,
    }


def collect(said: Said, runs: dict[str, list[Run]], work: Path) -> Said:
    starts = dict(said.get("warm start", {}))
    for _, claim in claims(work, START.name):
        starts[str(claim["seed"])] = {key: value for key, value in claim["deployed"].items() if key != "model"}
    new = {arm: [summary(run) for run in found] for arm, found in runs.items()}
    return said | {"warm start": starts, "runs": t.merged(said.get("runs", {}), new, list(RECIPES))}


# ---- tables ------------------------------------------------------------------------------------------------------


def to_level(runs: Figures, head: str, base: str, goal: str, part: float, axis: str) -> Column:
    """Cost to a part of the goal's final pass@1, over the cost of the base; all of the same seed."""

    def cell(found: list[Summary], _: list[Summary]) -> str:
        if base not in runs or goal not in runs:
            return "–"
        goals = {run["seed"]: run["curve"][-1][3] for run in runs[goal]}
        pairs, n = [], 0
        for run, other in t.paired(found, runs[base]):
            if run["seed"] in goals:
                n += 1
                level = part * goals[run["seed"]]
                costs = [t.cost_to(r["curve"], level, axis) for r in (run, other)]
                if costs[0] and costs[1]:
                    pairs.append((costs[0], costs[1]))
        missed = "" if len(pairs) == n else f"; {n - len(pairs)} of {n} did not get there"
        return t.text(t.paired_estimate(pairs, True), TWO) + missed

    return Column(head, cell)


def effective(tenth: int) -> t.Value:
    return lambda run: 1 - run["zero_variance_by_tenth"][tenth]


def greso_table(runs: Figures, arms: Sequence[str]) -> str:
    base = arms[0]
    columns = [
        SEEDS,
        t.mean("final pass@1", "pass@1"),
        t.difference("difference", "pass@1"),
        t.ratio("rollouts, all steps", "rollouts"),
        to_level(runs, "rollouts to DAPO's final pass@1", base, base, 1.0, "rollouts"),
        to_level(runs, "to 95% of it", base, base, 0.95, "rollouts"),
        to_level(runs, "tokens to 95% of it", base, base, 0.95, "tokens"),
        t.share("effective share, first tenth", effective(0)),
        t.share("last tenth", effective(-1)),
    ]
    return t.table_of(runs, columns, arms, base)


TARGET_COLUMNS = (
    SEEDS,
    t.mean("final pass@1", "pass@1"),
    t.mean("rollouts", "rollouts", "{:.0f}k", 1e-3),
    t.share("easy share, second half", "easy"),
    t.share("hard share", "hard"),
    t.mean("p_easy at the end", "p_easy", TWO),
    t.mean("p_hard", "p_hard", TWO),
    t.mean("swing of the zero-variance share", "swing"),
)
ACTIVE_COLUMNS = (
    SEEDS,
    t.mean("final pass@1", "pass@1"),
    t.difference("difference to uniform", "pass@1"),
    t.difference("difference, mean over training", "mean_pass@1"),
    t.ratio("rollouts", "rollouts"),
    t.share("f_zero, first tenth", "zero_variance_by_tenth.0"),
    t.share("last tenth", "zero_variance_by_tenth.-1"),
    t.mean("eta_eff, last tenth", "eta_eff_by_tenth.-1", "{:.1f}e-4", 1e4),
    t.mean("gradient norm", "grad_norm_by_tenth.-1", "{:.1f}"),
)
DEPLOYMENT_COLUMNS = (
    SEEDS,
    t.mean("pass@1", "deployed.pass@1"),
    t.mean("pass@16", "deployed.pass@16"),
    t.mean("pass@16 / pass@1", lambda run: run["deployed"]["pass@16"] / run["deployed"]["pass@1"], TWO),
)


def best_of_all(run: Summary) -> float:
    """pass@k of the largest k."""
    return float(run["pass_at"][max(run["pass_at"], key=int)])


OBJECTIVE_COLUMNS = (
    SEEDS,
    t.mean("pass@1, T = 1", "pass@1"),
    t.mean("pass@8, T = 1", best_of_all),
    t.difference("difference", best_of_all),
    t.mean("pass@16, deployment", "deployed.pass@16"),
    t.difference("difference", "deployed.pass@16"),
)


def adaptive_k_table(runs: Figures) -> str:
    rows = []
    for arm in ("active-adaptive-k", "all", "all-two-way"):
        for run in runs.get(arm, []):
            at, shares = run["size_rose_at_step"], run.get("zero_variance_around")
            drop = f"{shares[0]:.0%} -> {shares[1]:.0%}" if shares else "–"
            rows.append([arm, str(run["seed"]), "never" if at is None else str(at), drop])
    return t.markdown(["arm", "seed", "fired at step", "f_zero in the 20 steps before -> after"], rows)


def composed_table(runs: Figures) -> str:
    to_uniform = "tokens to uniform's final pass@1: of DAPO's, fixed rounds"
    columns = [
        SEEDS,
        t.mean("final pass@1", "pass@1"),
        t.mean("tokens, all steps", "tokens", "{:.0f}k", 1e-3),
        to_level(runs, to_uniform, "dapo-fixed", "uniform", 1.0, "tokens"),
        to_level(runs, "of DAPO's with exact refill", "dapo", "uniform", 1.0, "tokens"),
        to_level(runs, "to 95% of DAPO's final pass@1, of DAPO's", "dapo-fixed", "dapo-fixed", 0.95, "tokens"),
    ]
    return t.table_of(runs, columns, COMPOSED)


def tables(said: Said) -> dict[str, str]:
    runs: Figures = said["runs"]
    starts = [{"seed": int(seed), "deployed": deployed} for seed, deployed in said["warm start"].items()]
    objectives = ("uniform-g8", "max-at-4-g8")
    return {
        "greso": greso_table(runs, GRESO),
        "greso-4096": greso_table(runs, GRESO_4096),
        "targets": t.table_of(runs, TARGET_COLUMNS, TARGETS),
        "active": t.table_of(runs, ACTIVE_COLUMNS, ACTIVE, "uniform"),
        "active-band": t.table_of(runs, ACTIVE_COLUMNS, BANDED, "uniform"),
        "adaptive-k": adaptive_k_table(runs),
        "deployment": t.table_of({"warm start": starts} | runs, DEPLOYMENT_COLUMNS),
        "objectives": t.table_of(runs, OBJECTIVE_COLUMNS, objectives, objectives[0]),
        "composed": composed_table(runs),
    }


def draw(said: Said, path: Path) -> None:
    """Held-out pass@1 against tokens, and the zero-variance share by step; means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs: dict[str, list[dict[str, Any]]] = said["runs"]
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), constrained_layout=True)
    for column, (title, arms) in enumerate(LINES.items()):
        top, bottom = axes[0][column], axes[1][column]
        for arm in (a for a in arms if a in runs):
            _, tokens, _, passed = t.mean_curve(runs[arm]).T
            top.plot(tokens / 1e3, passed, label=f"{arm} (n={len(runs[arm])})")
            shares = np.mean([run["zero_variance_by_tenth"] for run in runs[arm]], axis=0)
            bottom.plot(np.arange(5, 100, 10), shares, marker="o", ms=3, label=arm)
        top.set(title=title, xlabel="sampled tokens, thousands", ylabel="held-out pass@1")
        bottom.set(xlabel="% of the steps", ylabel="zero-variance share (means of tenths)", ylim=(0, 0.8))
        top.legend(fontsize=8)
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


FAMILY = Family(
    work="claims",
    arms=tuple(
        Arm(name, recipe, changes, START, profiled=name.endswith("-band"))
        for name, (recipe, changes) in RECIPES.items()
    ),
    collect=collect,
    tables=tables,
    draw=draw,
    final=DEPLOYMENT,
)
