"""GRESO, Active-RLOO, Adaptive-K and all together on Countdown."""

from __future__ import annotations

import numpy as np
import tables as t
from families.base import Arm, Family, Start
from runs import Run, summary
from tables import SEEDS, TWO, Column, Figures

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
GRESO = ("dapo-fixed", "dapo-adaptive", "dapo", "greso", "greso-exact", "all")
GRESO_4096 = ("dapo-fixed-4096", "greso-4096", "all-4096")
TARGETS = ("greso-target-0", "greso", "greso-target-50", "greso-target-100", "backoff", "dapo")
ACTIVE = ("uniform", "active", "active-band", "lr-const-2x", "lr-ramp", "active-adaptive-k", "active-adaptive-k-band")
OBJECTIVES = ("uniform-g8", "max-at-4-g8")


def swing(run: Run) -> float:
    """Standard deviation of the zero-variance share's ten-step means over the second half: how much it oscillates."""
    values = run.series("frac_reward_zero_std")
    late = values[len(values) // 2 :]
    means = [float(np.mean(late[i : i + 10])) for i in range(0, len(late) - 9, 10)]
    return float(np.std(means))


def of_run(run: Run) -> t.Summary:
    return summary(run) | {
        "easy": run.share("frac_zero_easy", 0.5),
        "hard": run.share("frac_zero_hard", 0.5),
        "eta_eff_by_tenth": run.tenths("eta_eff", 8),
        "swing": swing(run),
    }


def effective(tenth: int) -> t.Value:
    return lambda run: 1 - run["zero_variance_by_tenth"][tenth]


PASSED = (SEEDS, t.mean("final pass@1", "pass@1"), t.difference("difference", "pass@1"))
GRESO_COLUMNS = (
    *PASSED,
    t.ratio("rollouts, all steps", "rollouts"),
    t.to_level("rollouts to 95% of DAPO's final pass@1", 0.95, "rollouts"),
    t.to_level("tokens to it", 0.95),
    t.share("effective share, first tenth", effective(0)),
    t.share("last tenth", effective(-1)),
)
TARGET_COLUMNS = (
    *PASSED[:2],
    t.mean("rollouts", "rollouts", "{:.0f}k", 1e-3),
    t.share("easy share, second half", "easy"),
    t.share("hard share", "hard"),
    t.mean("swing of the zero-variance share", "swing"),
)
ACTIVE_COLUMNS = (
    *PASSED,
    t.difference("difference, mean over training", "mean_pass@1"),
    t.ratio("rollouts", "rollouts"),
    t.share("f_zero, first tenth", "zero_variance_by_tenth.0"),
    t.share("last tenth", "zero_variance_by_tenth.-1"),
    t.mean("eta_eff, last tenth", "eta_eff_by_tenth.-1", "{:.1f}e-4", 1e4),
)
DEPLOYMENT_COLUMNS = (
    SEEDS,
    t.mean("pass@1", "deployed.pass@1"),
    t.mean("pass@16", "deployed.pass@16"),
    t.mean("pass@16 / pass@1", lambda run: run["deployed"]["pass@16"] / run["deployed"]["pass@1"], TWO),
)
OBJECTIVE_COLUMNS: tuple[Column, ...] = (
    *PASSED,
    t.mean("pass@16, deployment", "deployed.pass@16"),
    t.difference("difference", "deployed.pass@16"),
)


def tables(runs: Figures) -> dict[str, str]:
    return {
        "greso": t.table_of(runs, GRESO_COLUMNS, GRESO, GRESO[0]),
        "greso-4096": t.table_of(runs, GRESO_COLUMNS, GRESO_4096, GRESO_4096[0]),
        "targets": t.table_of(runs, TARGET_COLUMNS, TARGETS),
        "active": t.table_of(runs, ACTIVE_COLUMNS, ACTIVE, ACTIVE[0]),
        "deployment": t.table_of(runs, DEPLOYMENT_COLUMNS),
        "objectives": t.table_of(runs, OBJECTIVE_COLUMNS, OBJECTIVES, OBJECTIVES[0]),
    }


FAMILY = Family(
    work="claims",
    arms=tuple(
        Arm(name, recipe, changes, START, profiled=name.endswith("-band"))
        for name, (recipe, changes) in RECIPES.items()
    ),
    tables={"claims.json": tables},
    of_run=of_run,
    final=DEPLOYMENT,
)
