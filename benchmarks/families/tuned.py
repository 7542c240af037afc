"""What a tuned DAPO needs on several tasks, and what is saved on it: every arm at several learning rates.

Rates are chosen on `TUNING`, seeds that are not reported. The engine decodes together what siblings share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tables as t
from families import selection, stopping
from families.base import Arm, Family, Start
from runs import Run, summary
from speedrun.tracks import DAPO as DAPO_REFILL
from tables import SEEDS, Column, Figures

TUNING = (9, 8)
"""Most arms were run on the first alone."""
RATES = (0.25, 0.5, 1, 2, 4)
"""In units of the task's. Not every arm has been run at each."""
FIXED = ("rollout_batch.name=fixed", "rollout_batch.surplus=discard")
ROUNDS = ("rollout_batch=adaptive", "max_lag=1")
GRESO = ("selector=greso", *ROUNDS)
BAYES = ("selector=bayes", *ROUNDS)
REUSE = ("reuse={updates: 4, max_age: 16, min_ess: 0.5}", "step_scale=ess")
TWICE = ("reuse={updates: 2, max_age: 16, min_ess: 0.5}", "step_scale=ess")
CLIP = ("policy_loss=clip", "epsilon_high=0.28", "correction=none")
PROBE = ("group_size={name: sequential, probe: 4}",)
SMALL = ("prompts_per_step=8",)
"""As many optimizer steps a sampled token as `REUSE` has, each with a quarter of the groups."""
MEDIUM = ("prompts_per_step=16",)
WIDE = ("num_generations=16",)
HARD = ("group_size={name: sequential, probe: 4, hard_size: 16}",)
ACTIVE = ("num_generations=4", "filter={name: zero_variance, refill: false}")
ADAPTIVE_K = ("group_size={name: adaptive_k, tau: 0.5, window: 5}",)
LINEAR = ("lr_scheduler_type=linear",)
DRAFTS = ("speculative=true",)
SHARED = (*BAYES, *SMALL, *DRAFTS)
SHARED_TWICE = (*SHARED, *TWICE, *CLIP)
ORACLE = ("selector={name: pass_rate, low: 0.1, high: 0.9, refresh_steps: 100}", "rollout_batch=adaptive", "max_lag=1")
"""Knows every pass rate: all prompts are rolled out 16 times every 100 steps, which costs it nothing here."""
METHODS: dict[str, tuple[str, ...]] = {
    "dapo-fixed": FIXED,
    "dapo": (),
    "dapo-small": (*FIXED, *SMALL),
    "dapo-fixed-linear": (*FIXED, *LINEAR),
    "dapo-fixed-linear-half": (*FIXED, *LINEAR),
    "greso": GRESO,
    "uniform": ("num_generations=4", "filter=keep_all"),
    "active": ACTIVE,
    "active-adaptive-k": (*ACTIVE, *ADAPTIVE_K),
    "all": ("selector=greso", *ACTIVE, *ADAPTIVE_K),
    "arrol": ("gates=[arrol]", "num_generations=16", "prompts_per_step=16"),
    "backoff": ("selector=backoff", *ROUNDS),
    "mopps": ("selector=thompson", *ROUNDS),
    "mopps-small": ("selector=thompson", *ROUNDS, *SMALL),
    "speed-rl": (*ROUNDS, *PROBE),
    "pilot-commit": ("selector=backoff", *ROUNDS, "group_size={name: sequential, probe: 2}"),
    "reinforce-ada": (*ROUNDS, *HARD),
    "reinforce-ada-balanced": (*ROUNDS, "group_size={name: sequential, probe: 4, balanced: true}"),
    "knapsack": (*ROUNDS, "group_size={name: allocate, value: knapsack}"),
    "greso-small": (*GRESO, *SMALL),
    "greso-reuse-4": (*GRESO, *REUSE),
    "greso-reuse-4-clip": (*GRESO, *REUSE, *CLIP),
    "greso-reuse-4-probe": (*GRESO, *REUSE, *CLIP, *PROBE),
    "bayes-reuse-4-probe": (*BAYES, *REUSE, *CLIP, *PROBE),
    "thrifty": (*BAYES, *SMALL),
    "oracle": (*ORACLE, *SMALL),
    "bayes-shared": (*BAYES, *DRAFTS),
    "mopps-shared": ("selector=thompson", *ROUNDS, *DRAFTS),
    "oracle-shared": (*ORACLE, *DRAFTS),
    "thrifty-shared": SHARED,
    "thrifty-shared-linear": (*SHARED, *LINEAR),
    "thrifty-shared-linear-long": (*SHARED, *LINEAR),
    "thrifty-shared-medium-linear": (*BAYES, *MEDIUM, *DRAFTS, *LINEAR),
    "thrifty-shared-wide-linear": (*SHARED, *WIDE, *LINEAR),
    "thrifty-shared-twice": SHARED_TWICE,
    "thrifty-shared-twice-linear": (*SHARED_TWICE, *LINEAR),
}
"""Arm -> what it changes in the task's recipe, which refills groups without signal exactly."""
STEPS = {REUSE[0]: 10 / 3, SMALL[0]: 4, MEDIUM[0]: 8 / 3}
"""Change -> how many times as many optimizer steps an arm with it has."""
LENGTHS = {"dapo-fixed-linear-half": 1 / 2, "thrifty-shared-linear-long": 4 / 3, "thrifty-shared-wide-linear": 3 / 4}
"""Arm -> the factor by which its number of optimizer steps differs from that of others with its changes."""


@dataclass(frozen=True)
class Setting:
    """A recipe, what all arms change in it, and the unit of its learning rates."""

    recipe: str
    changes: tuple[str, ...]
    rate: float
    steps: int
    """Of an arm without a change in `STEPS`."""
    eval_steps: int
    """The same."""
    start: Start | None = None


TASKS = {
    "countdown": Setting("countdown-dapo", ("env.train_size=4096",), 1e-4, 300, 25, selection.START),
    "chain": Setting(
        "chain-sum-arrol",
        (*DAPO_REFILL, "eval_prompts=256", "eval_generations=4"),
        1e-4,
        60,
        5,
        stopping.STARTS["chain-sum"],
    ),
    "alfworld": Setting(
        "alfworld",
        (*DAPO_REFILL, "eval_generations=4"),
        1e-4,
        30,
        3,
        Start("alfworld", stopping.ROOMS.settings, "warm-alfworld", shared=True),
    ),
    "smollm2": Setting(
        "arithmetic-smollm2",
        (*DAPO_REFILL, "model=smollm2-135m", "threads=1", "eval_prompts=256", "eval_generations=2"),
        1e-5,
        30,
        3,
    ),
}
BASES = ("dapo-fixed", "dapo")
"""Of these all sampled tokens count, as in an engine that does not share."""
TWINS = {"dapo-fixed": "dapo-fixed-shared", "dapo": "dapo-shared"}
"""Base -> the same runs, of which the decoded tokens count."""
COMPOSITIONS: dict[str, tuple[tuple[str, float], ...]] = {
    "chain": (("thrifty-shared-twice-linear", 1),),
    "smollm2": (("thrifty-shared-twice", 1),),
    "countdown": (("mopps-shared", 2), ("thrifty-shared-linear", 2)),
    "alfworld": (("mopps-shared", 2), ("thrifty-shared-twice", 0.5)),
}
"""Task -> compositions and their rates."""
BASE_RATE = 2
"""Of DAPO on every task: its best one in the engine of today."""


def name_of(arm: str, rate: float, task: str = "countdown") -> str:
    return f"{arm}-lr{rate}" if task == "countdown" else f"{task}-{arm}-lr{rate}"


def names_of(arms: Iterable[str]) -> list[str]:
    """Of these arms on every task and at every rate."""
    return [name_of(arm, rate, task) for arm in arms for task in TASKS for rate in RATES]


WHOLE = frozenset(names_of((*BASES, "dapo-fixed-linear")))
"""Arms of which all sampled tokens count; of the others those that the engine decoded."""


def of_run(run: Run) -> t.Summary:
    return summary(run, decoded=run.claim["arm"] not in WHOLE)


COLUMNS: tuple[Column, ...] = (
    SEEDS,
    t.mean("final pass@1", "pass@1"),
    t.difference("difference", "pass@1"),
    t.difference("over 8 answers", "deployed.pass@1"),
    t.difference("pass@8", "deployed.pass@8"),
    t.ratio("tokens", "tokens"),
    t.ratio("sampled tokens", lambda run: run["tokens"] + run["accepted"] if "accepted" in run else None),
    t.ratio("seconds", "seconds"),
    t.at_equal_tokens("pass@1 at equal tokens"),
    t.to_level("tokens to 95% of the base's final pass@1", 0.95),
    t.to_level("seconds to it", 0.95, "seconds"),
)
TUNING_COLUMNS = (
    SEEDS,
    t.mean("final pass@1", "pass@1"),
    t.mean("mean over the run", "mean_pass@1"),
    t.mean("pass@8", "deployed.pass@8"),
    t.mean("tokens", "tokens", "{:.2f}M", 1e-6),
)


def of_task(runs: Figures, task: str) -> list[str]:
    """Names of its arms; those of Countdown have no prefix."""
    others = tuple(f"{name}-" for name in TASKS if name != "countdown")
    if task == "countdown":
        return [arm for arm in runs if not arm.startswith(others)]
    return [arm for arm in runs if arm.startswith(f"{task}-")]


def tables(runs: Figures, prefix: str = "tuned") -> dict[str, str]:
    """For each task and base the arms that have a seed in common with it, and every arm on the tuning seeds."""
    counted = {arm: [run for run in of_arm if run["seed"] not in TUNING] for arm, of_arm in runs.items()}
    tuning = {arm: [run for run in of_arm if run["seed"] in TUNING] for arm, of_arm in runs.items()}
    made = {}
    for task in TASKS:
        arms = of_task(runs, task)
        for base in (*BASES, *TWINS.values()):
            name = name_of(base, BASE_RATE, task)
            seeds = {run["seed"] for run in counted.get(name, [])}
            paired = {arm: [run for run in counted[arm] if run["seed"] in seeds] for arm in arms}
            if sum(map(bool, paired.values())) > 1:
                order = [name, *(arm for arm in arms if arm != name)]
                made[f"{prefix}-{task}-{base}"] = t.table_of(paired, COLUMNS, order, name)
        if any(tuning[arm] for arm in arms):
            made[f"{prefix}-{task}-rates"] = t.table_of(tuning, TUNING_COLUMNS, arms)
    return made


def draw(runs: Figures, path: Path) -> None:
    """Held-out pass@1 against decoded tokens: means over the seeds that count."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for task, axis in zip(COMPOSITIONS, axes.flat, strict=True):
        shown = [*((arm, BASE_RATE) for arm in ("dapo-fixed", "dapo-fixed-shared")), *COMPOSITIONS[task]]
        for number, (arm, rate) in enumerate(shown):
            of_arm = [run for run in runs.get(name_of(arm, rate, task), []) if run["seed"] not in TUNING]
            if of_arm:
                tokens = np.linspace(0, min(run["curve"][-1][1] for run in of_arm), 60)
                passed = np.mean([[t.at_cost(run["curve"], x) for x in tokens] for run in of_arm], axis=0)
                axis.plot(tokens / 1e6, passed, f"C{number}", label=f"{arm} (n={len(of_arm)})")
        axis.set(title=task, xlabel="tokens decoded (drafts, prompts not counted), millions", ylabel="held-out pass@1")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def arms() -> Iterator[Arm]:
    for task, each in TASKS.items():
        for arm, changes in METHODS.items():
            more = LENGTHS.get(arm, 1) * math.prod(STEPS.get(change, 1) for change in changes)
            for rate in RATES:
                settings = (
                    f"learning_rate={rate * each.rate:g}",
                    f"max_steps={round(each.steps * more)}",
                    f"eval_steps={round(each.eval_steps * more)}",
                )
                yield Arm(name_of(arm, rate, task), each.recipe, (*each.changes, *changes, *settings), each.start)


FAMILY = Family(
    work="shared",
    arms=tuple(arms()),
    tables={"shared.json": tables, "thrifty.json": lambda runs: tables(runs, "every-token")},
    of_run=of_run,
    twins=dict(zip(names_of(TWINS), names_of(TWINS.values()), strict=True)),
    draw=draw,
    default=tuple(
        name_of(arm, rate, task)
        for task, compositions in COMPOSITIONS.items()
        for arm, rate in (("dapo-fixed", BASE_RATE), *compositions)
    ),
    may_stop=True,
    jobs=1,
)
